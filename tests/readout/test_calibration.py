"""The speeds of a virtual machine by a run on real devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import MS, rank, run as run_of, summary

from zeromon.base.errors import LaunchError
from zeromon.readout.preflight import calibrated_speeds, calibration_text

MODELLED = [((0.05, 0.06), (0.01, 0.01)), ((0.04, 0.05), (0.01, 0.01))]
"""By both kinds of host; the slower device computes 40 and 50 ms."""


def on_devices(starved_ms: int = 0, **facts: Any) -> Any:
    """Steps of 30 ms forward, 50 ms backward and 10 ms optimizer, of which 10 ms are exposed."""
    steps = [summary(n, launch_ns=(0, MS, MS, MS), starved_ns=starved_ms * MS) for n in range(1, 21)]
    return rank(recent=tuple(steps), exposed_seconds=0.01, **facts)


def row(nbytes: int, rate: float, nodes: int = 1) -> Any:
    (first, *_) = rank().communication.traffic
    return replace(first, nbytes=nbytes, calls=2.0, busbw_bytes_per_second=rate, nodes=nodes)


def test_kernels_take_what_a_device_bound_run_took() -> None:
    """90 ms of phases less 10 exposed, for 40 modelled."""
    speeds = calibrated_speeds(run_of(on_devices()), MODELLED)
    assert (speeds["slow"], speeds["operator_ns"]) == (pytest.approx(2), 9000)


def test_the_operators_of_a_launch_bound_run_take_what_its_host_took() -> None:
    """80 ms for 50 modelled: 9 us become 14.4."""
    speeds = calibrated_speeds(run_of(on_devices(starved_ms=70)), MODELLED)
    assert (speeds["slow"], speeds["operator_ns"]) == (1, pytest.approx(14_400))


def test_links_have_the_bandwidth_of_the_largest_messages() -> None:
    rows = (row(8 << 20, 3e9), row(64 << 20, 5e9), row(64 << 20, 2e9, nodes=2), row(1 << 10, 9e9))
    speeds = calibrated_speeds(run_of(on_devices(traffic=rows)), MODELLED)
    assert [speeds[k] for k in ("node_speed", "pcie_speed", "network_speed")] == [5e9, 5e9, 2e9]
    few = calibrated_speeds(run_of(on_devices(traffic=(row(1 << 10, 9e9),))), MODELLED)
    assert "node_speed" not in few and "as modelled (no large collective)" in calibration_text("r", few)


def test_a_run_on_cpus_says_nothing_of_devices() -> None:
    with pytest.raises(LaunchError, match="no steps of"):
        calibrated_speeds(run_of(rank()), MODELLED)
