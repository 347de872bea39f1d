"""NCCL on the virtual device: right values, times that follow the links, and hangs where NCCL hangs."""

from __future__ import annotations

import pytest

from vgpu.conftest import SHORT_DUMP, CudaRunner
from zeromon.snapshot import HangKind

pytestmark = pytest.mark.vgpu


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.short), 4, 8])
def test_every_collective_is_right(cuda_run: CudaRunner, ranks: int) -> None:
    """All functions of ProcessGroupNCCL, ten types, five reductions."""
    run = cuda_run("collectives.py", ranks=ranks)
    for rank in range(ranks):
        assert f"rank {rank}: 171 results are right" in run.output
    for one in run.truth(0).of("collective"):
        if "bus_bytes" in one.detail:  # latency of the node, and its bandwidth
            seconds = 12e-6 + int(one.detail["bus_bytes"]) / 360e9
            assert one.end - one.transfer == pytest.approx(seconds * 1e9, abs=2)
    comms = {one.detail["comm"] for one in run.truth(ranks - 1).of("collective")}
    assert any("." in comm for comm in comms)  # the subgroup's communicator was split off


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
