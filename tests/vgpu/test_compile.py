"""torch.compile by inductor on the virtual device: Triton's kernels take time and compute nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from vgpu.conftest import CudaRunner
from vgpu.environment import Environment
from vgpu.truth import Timeline

pytestmark = pytest.mark.vgpu

DEFAULT_STREAM = 7
STEPS = 7
FIRST, LAST = 2, STEPS - 2
"""Steps of the program, from 0, that are compared: after those that compile."""
SHAPE = ("--layers", "2", "--hidden", "512", "--steps", str(STEPS), "--log", "0")
SLOW = {"slow": 300, "node_speed": 2e8}
"""The host is ahead of the device, and communication cannot hide whole."""


@pytest.fixture
def compiled_run(virtual_cuda: Environment, cuda_run: CudaRunner, tmp_path: Path) -> CudaRunner:
    """Runs a program that compiles, from empty caches; skips where Triton is not installed."""
    if not virtual_cuda.has_triton:
        pytest.skip("no Triton for the virtual device: make vgpu")
    caches = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    return partial(cuda_run, **caches)


def count_kernels(truth: Timeline, step: int, start: str) -> int:
    """Kernels of a step whose name starts so."""
    begin, end = truth.steps[step]
    return sum(begin <= o.start < end and o.name.startswith(start) for o in truth.of("kernel"))


def test_compiled_ddp_exposes_what_the_timeline_has(compiled_run: CudaRunner) -> None:
    """Forward and backward are compiled; the exposed share is within a point of a step."""
    run = compiled_run(
        "train.py", "ddp", *SHAPE, "--bucket-view", "--compile", changes=SLOW, watched=True
    )
    assert len(list((run.folder / "timeline").iterdir())) == 2  # none of a process that compiles
    for rank in run.record.ranks:
        truth = run.truth(rank.rank)
        for kind in ("triton_poi_", "triton_per_"):
            assert count_kernels(truth, LAST, kind) == count_kernels(truth, FIRST, kind) > 0
        steps = [one for one in rank.steps.recent if FIRST < one.step <= LAST + 1]
        timed = [one for one in steps if one.timed and not one.idle]
        assert len(steps) == LAST - FIRST + 1 and timed
        share = sum(one.exposed_ns for one in timed) / sum(o.end_ns - o.start_ns for o in timed)
        start, end = truth.window(FIRST, LAST)
        waited = truth.blocked(start, end, DEFAULT_STREAM) / (end - start)
        assert waited > 0.05 and share == pytest.approx(waited, abs=0.01)


def test_compiled_fsdp2_exposes_what_the_timeline_has(compiled_run: CudaRunner) -> None:
    """Forward, backward and optimizer are compiled; all waits of the compute stream, within 1 %."""
    words = ("train.py", "fsdp2", *SHAPE, "--compile", "--compile-optimizer")
    run = compiled_run(*words, changes=SLOW, watched=True)
    for rank in run.record.ranks:
        truth = run.truth(rank.rank)
        for kind in ("triton_poi_", "triton_per_", "triton_for_"):  # the last: AdamW of all tensors
            assert count_kernels(truth, LAST, kind) == count_kernels(truth, FIRST, kind) > 0
        assert all(row.timed == row.count for row in rank.communication.collectives)
        waited = truth.blocked(*truth.window(0, STEPS - 1), DEFAULT_STREAM) / 1e9
        exposed = sum(row.exposed_seconds for row in rank.communication.collectives)
        assert exposed == pytest.approx(waited, rel=0.01)


def test_compiled_graphs_replay_their_kernels(compiled_run: CudaRunner) -> None:
    run = compiled_run("compiled.py", "graph", ranks=1)
    counts = [count_kernels(run.truth(), step, "triton_") for step in range(2, 5)]
    assert counts[0] > 0 and len(set(counts)) == 1


def test_arithmetic_refuses_a_kernel_of_triton(compiled_run: CudaRunner) -> None:
    """Nothing computes it: a result would be wrong."""
    run = compiled_run("compiled.py", "kernel", ranks=1, arithmetic=True, ends_well=False)
    assert run.result.code != 0
    assert "vgpu: increment_values: computes nothing" in run.output
