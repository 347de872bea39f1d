"""What zeromon calls exposed under FSDP2 is what the device's own timeline has."""

from __future__ import annotations

import pytest

from vgpu.conftest import CudaRunner

pytestmark = pytest.mark.vgpu

DEFAULT_STREAM = 7
STEPS = 5
SLOW = {"slow": 3000, "node_speed": 2e7}
"""The host is ahead of the device, whoever else uses the CPUs, and communication cannot hide whole."""


@pytest.mark.parametrize(
    ("options", "micro_steps"), [((), STEPS), (("--keep",), STEPS), (("--accumulate", "2"), 2 * STEPS)]
)
def test_exposed_is_what_the_compute_stream_waited(
    cuda_run: CudaRunner, options: tuple[str, ...], micro_steps: int
) -> None:
    """Each wait of the compute stream for a collective, on both ranks, within 1 %.

    The agent reads events in a later step, and never waits for them: the last micro-steps of a program
    that ends are not among its timed ones.
    """
    shape = ("--hidden", "512", "--steps", str(STEPS), "--log", "0")
    run = cuda_run("train.py", "fsdp2", *shape, *options, changes=SLOW, watched=True)
    for rank in run.record.ranks:
        gathers = next(row for row in rank.communication.collectives if row.op == "all_gather")
        timed = gathers.timed * micro_steps // gathers.count
        assert timed >= micro_steps // 2
        truth = run.truth(rank.rank)
        forwards = [mark.end for mark in truth.marks if mark.name == "forward"]
        start, end = truth.window(0, STEPS - 1)
        waited = truth.blocked(start, [*forwards, end][timed], DEFAULT_STREAM) / 1e9
        assert sum(row.exposed_seconds for row in rank.communication.collectives) == pytest.approx(
            waited, rel=0.01
        )
        # Of the best gather, whose ranks may have come some milliseconds apart.
        assert 0.95 * 2e7 < gathers.best_busbw_bytes_per_second < 1.01 * 2e7
