"""torch.profiler's trace of the virtual device equals its timeline."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from vgpu.conftest import CudaRun, CudaRunner
from vgpu.truth_table import BOUNDS
from zeromon.traces.analysis import analyze_trace
from zeromon.traces.kineto import read_trace
from zeromon_vgpu.intervals import length, subtract, union

pytestmark = pytest.mark.vgpu

ROUNDS = 5


def trace_events(run: CudaRun, rank: int) -> list[dict[str, Any]]:
    trace = json.loads((run.folder / f"trace-{rank}.json").read_text())
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def test_the_trace_is_the_timeline(each_cuda_run: CudaRunner) -> None:
    """Each operation once, after its launch, of the same stream, bytes and, within 2 us, times."""
    run = each_cuda_run("profiled.py")
    for rank in range(2):
        events = trace_events(run, rank)
        calls = [event for event in events if event["cat"] == "cuda_runtime"]
        launches = {call["args"]["correlation"]: call for call in calls}
        truth = {o.correlation: o for o in run.truth(rank).of("kernel", "collective", "copy")}
        traced = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy")]
        names = Counter(event["name"].split("_")[0] for event in traced)
        assert names["ncclDevKernel"] == ROUNDS and names["sm90"] == ROUNDS
        assert len(traced) == 5 * ROUNDS and len({e["args"]["correlation"] for e in traced}) == 25
        first = truth[traced[0]["args"]["correlation"]].start / 1e3 - traced[0]["ts"]
        for event in traced:
            operation = truth[event["args"]["correlation"]]
            assert event["args"]["stream"] == operation.stream
            assert event["ts"] + first == pytest.approx(operation.start / 1e3, abs=2)
            duration = (operation.end - operation.start) / 1e3
            assert event["dur"] == pytest.approx(duration, rel=1e-4, abs=0.01)
            assert launches[event["args"]["correlation"]]["ts"] <= event["ts"] + 1
            if operation.kind == "copy":
                assert event["args"]["bytes"] == operation.bytes
            elif not operation.name.startswith("_Z"):  # else the profiler demangles it
                assert event["name"] == operation.name


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("strategy", [("ddp",), ("fsdp2", "--offload"), ("zero3",)])
def test_the_parts_of_a_trace_are_those_of_the_timeline(
    cuda_run: CudaRunner, bound: str, strategy: tuple[str, ...]
) -> None:
    """Compute, exposed communication, exposed copies and idle time within 0.1 % of the span.

    Fills and copies within a device are copies, as in Holistic Trace Analysis.
    """
    machine, shape = BOUNDS[bound]
    run = cuda_run("train.py", *strategy, *shape, "--profile", forked=True, changes=machine)
    for rank in range(2):
        traced = analyze_trace(read_trace(run.folder / f"trace-{rank}.json"), rank)
        seen = {event["args"].get("correlation") for event in trace_events(run, rank)} - {None}
        truth = run.truth(rank)
        operations = [
            one for one in truth.of("kernel", "collective", "copy", "fill") if one.correlation in seen
        ]
        span = max(one.end for one in operations) - min(one.start for one in operations)
        c, k, m = (
            union(one.span for one in operations if one.kind in kinds)
            for kinds in (("collective",), ("kernel",), ("copy", "fill"))
        )
        exposed, copies = length(subtract(c, k)), length(subtract(m, union([*c, *k])))
        idle = span - length(k) - exposed - copies
        found = (
            traced.span_seconds, traced.compute_seconds, traced.exposed_seconds,
            traced.exposed_copy_seconds, traced.idle_seconds,
        )  # fmt: skip
        wanted = [part / 1e9 for part in (span, length(k), exposed, copies, idle)]
        assert found == pytest.approx(wanted, abs=span / 1e12)
        assert traced.overlap_ratio == pytest.approx(1 - exposed / length(c), abs=0.001)
