"""NCCL on the virtual device: right values, times that follow the links, and hangs where NCCL hangs."""

from __future__ import annotations

import pytest

from vgpu.conftest import SHORT_DUMP, CudaRun, CudaRunner
from zeromon.snapshot.communication import HangKind

pytestmark = pytest.mark.vgpu


def check_collectives(run: CudaRun, ranks: int, latency: float, speed: float) -> None:
    """Asserts right values on all ranks, and that rank 0's collectives took a link of that speed."""
    for rank in range(ranks):
        assert f"rank {rank}: 171 results are right" in run.output
    for one in run.truth(0).of("collective"):
        if "bus_bytes" in one.detail:
            seconds = latency + int(one.detail["bus_bytes"]) / speed
            assert one.end - one.transfer == pytest.approx(seconds * 1e9, abs=2)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.short), 4, 8])
def test_every_collective_is_right(cuda_run: CudaRunner, ranks: int) -> None:
    """All functions of ProcessGroupNCCL, ten types, five reductions."""
    run = cuda_run("collectives.py", ranks=ranks)
    check_collectives(run, ranks, 12e-6, 360e9)
    comms = {one.detail["comm"] for one in run.truth(ranks - 1).of("collective")}
    assert any("." in comm for comm in comms)  # the subgroup's communicator was split off


def test_every_collective_is_right_on_64_ranks_of_8_nodes(cuda_run: CudaRunner) -> None:
    """Needs 10 GB of host memory: one import of torch serves all ranks."""
    run = cuda_run("collectives.py", ranks=64, nodes=8, forked=True)
    check_collectives(run, 64, 30e-6, 45e9)


@pytest.mark.parametrize(
    ("runner", "watchdog"),
    [
        ("cuda_run", "Watchdog caught collective operation timeout"),
        ("newest_cuda_run", "before aborting"),
    ],
)
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("sizes", HangKind.MISMATCHED_SIZES),
        ("operations", HangKind.MISMATCHED_OPERATIONS),
        ("missing", HangKind.MISSING_MEMBER),
    ],
)
def test_ranks_that_disagree_hang_until_the_watchdog_ends_them(
    request: pytest.FixtureRequest, runner: str, watchdog: str, case: str, kind: HangKind
) -> None:
    """The newest torch has another backend under the name of NCCL, with numbers of its own."""
    cuda_run: CudaRunner = request.getfixturevalue(runner)
    run = cuda_run("hangs.py", case, watched=True, ends_well=False, **SHORT_DUMP)
    assert run.result.code != 0
    assert watchdog in run.output
    assert "went on" not in run.output
    assert [hang.kind for hang in run.record.hangs] == [kind]


def test_an_abort_ends_a_collective_that_hangs(cuda_run: CudaRunner) -> None:
    run = cuda_run("hangs.py", "abort")
    assert "rank 0 went on" in run.output and "rank 1 went on" in run.output
