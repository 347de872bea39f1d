"""The risks of a snapshot: of the host's memory, which ranks share, and of the device's."""

from __future__ import annotations

import pytest
from builders import changed, device_memory, rank, run, summary

from zeromon.memory.forecast import host_capacity_bytes, host_risk, risks_of_rank
from zeromon.readout.verdict import risk_text
from zeromon.snapshot.host import HostMemory
from zeromon.tui.status_text import verdict_line as sentence

GIB = 1 << 30


def test_the_hosts_memory_is_shared_by_the_ranks_of_a_node() -> None:
    """Two ranks that grow by 0.1 GiB per step each; 12 GiB are left to both: 60 steps."""
    recent = tuple(summary(n, rss_bytes=round((1 + 0.1 * n) * GIB)) for n in range(1, 101))
    room = HostMemory(headroom_bytes=12 * GIB)
    ranks = [rank(n, recent=recent, rss_bytes=11 * GIB, host=room) for n in (0, 1)]
    assert host_capacity_bytes(ranks) == 34 * GIB
    risk = host_risk(ranks)
    assert risk is not None and risk.cause == "growth"
    assert risk.steps_left == pytest.approx(60, abs=2)
    said = risk_text(risk, ranks[0])
    assert "now 22.0 GiB in use by all ranks, 12.0 GiB available" in said and said.startswith(
        "host memory runs out"
    )
    one = changed(ranks[0], risks=(risk,))
    line = "".join(text for text, _ in sentence(run(one)))
    assert "host" in line and "rank 0" not in line  # the host's memory is that of all
    assert host_risk([changed(one, host=None, host_available_bytes=-1) for one in ranks]) is None
    assert host_risk([changed(one, alive=False) for one in ranks]) is None


def test_device_risk_counts_what_is_not_torchs() -> None:
    """40 reserved and only 36 free of 80: the capacity is 76."""
    recent = tuple(summary(n, allocated_bytes=40 * GIB, reserved_bytes=40 * GIB) for n in range(1, 30))
    (device,) = risks_of_rank(rank(0, memory_device=device_memory(), recent=recent))
    assert (device.pool, device.capacity_bytes) == ("device", 76 * GIB)
