"""What zeromon calls exposed under FSDP2 is what the device's own timeline has."""

from __future__ import annotations

import pytest

from vgpu.conftest import CudaRunner

pytestmark = pytest.mark.vgpu

DEFAULT_STREAM = 7
STEPS = 5
SLOW = {"slow": 3000, "node_speed": 2e7}
"""The host is ahead of the device, whoever else uses the CPUs, and communication cannot hide whole."""


@pytest.mark.parametrize("options", [(), ("--keep",), ("--accumulate", "2")])
def test_exposed_is_what_the_compute_stream_waited(
    cuda_run: CudaRunner, options: tuple[str, ...]
) -> None:
    """Each wait of the compute stream for a collective, on both ranks, within 1 %.

    The agent reads events in a later step, and never waits for them: the last steps of a program that
    ends are not among its timed ones.
    """
    shape = ("--hidden", "512", "--steps", str(STEPS), "--log", "0")
    run = cuda_run("train.py", "fsdp2", *shape, *options, changes=SLOW, watched=True)
    for rank in run.record.ranks:
        gathers = next(row for row in rank.collectives if row.op == "all_gather")
        timed_steps = gathers.timed * STEPS // gathers.count
        assert timed_steps >= 3
        truth = run.truth(rank.rank)
        waited = truth.blocked(*truth.window(0, timed_steps - 1), DEFAULT_STREAM) / 1e9
        found = sum(row.exposed_seconds for row in rank.collectives)
        assert found == pytest.approx(waited, rel=0.01)
        assert gathers.best_busbw_bytes_per_second == pytest.approx(2e7, rel=0.01)
