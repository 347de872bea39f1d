"""Steps, phases and exposed communication of CUDA runs are those of the device's own timeline."""

from __future__ import annotations

from itertools import pairwise

import pytest

from vgpu.conftest import CudaRun, CudaRunner
from vgpu.truth import NOTHING, Timeline
from zeromon.readout.breakdown import pace, step_parts
from zeromon.ring.codes import Phase
from zeromon.snapshot import RankSnapshot, StepSummary
from zeromon.snapshot.step import Stream
from zeromon.storage.snapshot_log import Past
from zeromon_vgpu.intervals import clip, length, subtract, union
from zeromon_vgpu.machine import Fault

pytestmark = pytest.mark.vgpu

COMPUTE_STREAM = 7
STEPS = 10
MACHINE = {"slow": 300, "node_speed": 2e8}
"""Kernels are so slow that the host is ahead of the device, and communication cannot hide whole."""
SHAPE = ("--hidden", "512", "--steps", str(STEPS))
FIRST, LAST = 2, STEPS - 2
"""Steps of the program, from 0, that are compared: neither the first nor the last one."""


def exposed(truth: Timeline, start: int, end: int) -> int:
    """|C \\ K| with the kernels of the compute stream alone.

    What FSDP copies and casts on other streams hides nothing here, and counts as compute in |C \\ K|.
    """
    work = truth.of("kernel", "fill", "copy")
    kernels = union(one.span for one in work if one.stream == COMPUTE_STREAM)
    return length(subtract(clip(truth.communication, start, end), kernels))


def compared(run: CudaRun, rank: RankSnapshot) -> tuple[list[StepSummary], Timeline, int, int]:
    """The steps of zeromon, and the window of the same steps on the device."""
    truth = run.truth(rank.rank)
    steps = [one for one in rank.steps.recent if FIRST < one.step <= LAST + 1]
    assert len(steps) == LAST - FIRST + 1 and all(one.timed for one in steps if not one.idle)
    return steps, truth, *truth.window(FIRST, LAST)


def assert_lanes_are_those_of_the_steps(run: CudaRun, rank: int, steps: list[StepSummary]) -> None:
    """The timeline of views has the steps and phases of the device, one behind the other."""
    lanes = Past(run.record_folder).lanes(20, (rank,))
    marks = {mark.step: mark for mark in lanes.steps}
    for step in steps:
        mark = marks[step.step]
        assert (mark.begin_ns, mark.end_ns, mark.untimed) == (step.start_ns, step.end_ns, step.untimed)
        spans = [
            span
            for span in lanes.spans
            if (span.step, span.stream) == (step.step, Stream.COMPUTE) and span.end_ns > span.begin_ns
        ]
        assert all(span.end_ns <= after.begin_ns for span, after in pairwise(spans))
        for name in ("forward", "backward", "optimizer"):
            spent = sum(span.end_ns - span.begin_ns for span in spans if span.name == name)
            assert spent == step.phase_ns[Phase[name.upper()]]


@pytest.mark.parametrize("log", ["1", "0"])
def test_no_figure_depends_on_how_often_the_loss_is_read(cuda_run: CudaRunner, log: str) -> None:
    """Read in every step, the host waits for the device; never read, it is ahead by the whole run."""
    run = cuda_run("train.py", "fsdp2", *SHAPE, "--log", log, changes=MACHINE, watched=True)
    for rank in run.record.ranks:
        steps, truth, start, end = compared(run, rank)
        assert sum(one.seconds for one in steps) == pytest.approx((end - start) / 1e9, rel=0.01)
        other = sum(step_parts(one)["other"] for one in steps)
        assert other < 0.03 * (end - start), "the host's lead is no time between phases"
        assert_lanes_are_those_of_the_steps(run, rank.rank, steps)
        ledger = {str(row.cause): row.seconds for row in rank.ledger.rows}
        trained = truth.figures(*truth.window(0, STEPS - 1))
        assert ledger["compute"] == pytest.approx(trained.compute / 1e9, rel=0.1)


@pytest.mark.parametrize(("strategy", "is_slow"), [("fsdp2", True), ("zero3", True), ("ddp", False)])
def test_who_sets_the_pace_is_what_the_timeline_says(
    cuda_run: CudaRunner, strategy: str, is_slow: bool
) -> None:
    """Kernels that are slow are queued; fast ones end before the host has enqueued the next."""
    words = (strategy, "--hidden", "512", "--steps", "24", "--log", "5")
    run = cuda_run("train.py", *words, changes=MACHINE if is_slow else {}, watched=True)
    for rank in run.record.ranks:
        truth, known = run.truth(rank.rank), pace(rank)
        figures = truth.figures(*truth.window(4, 22))
        assert known is not None and set(known.launch_seconds) == {"forward", "backward"}
        assert (known.starved_ratio < 0.1) is is_slow and (known.starved_ratio > 0.5) is not is_slow
        assert (figures.idle < 0.1 * figures.span) is is_slow
    launch_bound = [found for found in run.record.findings if found.rule == "launch_bound"]
    assert bool(launch_bound) is not is_slow


def test_the_rank_of_a_slow_device_is_named_under_ddp(cuda_run: CudaRunner) -> None:
    """No call of its reducer is seen: a rank arrives where its stream begins to wait for them all."""
    words = ("ddp", "--hidden", "512", "--steps", "40", "--log", "5")
    slow = [Fault("slow", rank=1, factor=1.5)]
    run = cuda_run("train.py", *words, changes=MACHINE, faults=slow, watched=True)
    (found,) = run.record.stragglers
    waits = [run.truth(rank).figures(*run.truth(rank).window(10, 38)) for rank in range(2)]
    late = (waits[0].exposed - waits[1].exposed) / 29e9
    assert found.rank == 1 and found.phases
    assert found.late_seconds == pytest.approx(late, rel=0.1)
    assert run.record.ranks[0].communication.wait_seconds == pytest.approx(late, rel=0.1)
    assert run.record.ranks[1].communication.wait_seconds == pytest.approx(0, abs=0.02 * late)


def test_a_barrier_is_exposed_communication(cuda_run: CudaRunner) -> None:
    """Its call waits for the late rank, and the device stands still meanwhile."""
    run = cuda_run("train.py", "ddp", *SHAPE, "--barrier", "5", watched=True)
    exposed_of = {rank.rank: rank.steps.recent[5] for rank in run.record.ranks}
    truth = run.truth(0)
    waited = truth.figures(truth.optimizer_end(4), truth.optimizer_end(5)).exposed
    assert waited > 0.4e9
    assert exposed_of[0].exposed_ns == pytest.approx(waited, rel=0.02)
    assert exposed_of[0].phase_exposed_ns[Phase.OTHER] > 0.4e9
    assert exposed_of[1].exposed_ns < 0.1e9


@pytest.mark.parametrize("backend", ["nccl", "nccl-legacy"])
@pytest.mark.parametrize("options", [(), ("--bucket-view",), ("--accumulate", "2")], ids="".join)
def test_each_bucket_of_ddp_is_timed_where_torch_calls_hooks(
    newest_cuda_run: CudaRunner, backend: str, options: tuple[str, ...]
) -> None:
    """One backend hides nothing: its compute stream waits as soon as the reducer asks for a future."""
    words = ("ddp", "--backend", backend, *SHAPE, *options)
    run = newest_cuda_run("train.py", *words, "--log", "5", changes=MACHINE, watched=True)
    for rank in run.record.ranks:
        steps, truth, *_ = compared(run, rank)
        # where the host is late, communication runs beside a stream that waits for the host
        usual = min(one.end_ns - one.start_ns for one in steps) * 1.1
        timed = [one for one in steps if not one.idle and one.end_ns - one.start_ns < usual]
        figures = sum(
            (truth.figures(*truth.window(one.step - 1, one.step - 1)) for one in timed), NOTHING
        )
        found = sum(one.exposed_ns for one in timed)
        assert found == pytest.approx(figures.exposed, abs=0.01 * figures.span)
        spent = sum(one.communication_ns for one in timed)
        assert spent == pytest.approx(figures.communication, rel=0.01)
        assert 1 - found / spent == pytest.approx(figures.overlap, abs=0.03)
        assert (figures.overlap == 0) is (backend == "nccl")
        assert {"bucket 0", "bucket 1"} <= {row.fqn for row in rank.communication.units}
        assert rank.waits_in_each_bucket is (backend == "nccl")
