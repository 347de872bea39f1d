"""The run of a preflight on the clock of its devices, by a timeline made by hand."""

from __future__ import annotations

import pytest
from builders import MS, rank, state, step

from zeromon.cli.virtual_machine import HostCalls, modelled_steps, on_modelled_clock, waits_by_unit
from zeromon.fold.fold import fold_event
from zeromon.fold.summarize import summarize_rank
from zeromon.readout.figures import STEP
from zeromon.readout.text import exposed_unknown
from zeromon.ring.codes import Phase
from zeromon_vgpu.timeline import Operation

GATHER = "ncclDevKernel_AllGather_RING_LL(args)"


def operation(
    kind: str, enqueued_ms: float, start_ms: float, end_ms: float, name: str = ""
) -> Operation:
    """One that this host enqueues late, and whose device would run it from *start_ms* to *end_ms*."""
    times = round(start_ms * MS), round(end_ms * MS)
    at = round(enqueued_ms * MS)
    return Operation(
        kind, 0, 7, 0, at, at, at, -1, at + MS, 1000, "", ((0, 1), times), "", {}, name or kind
    )  # fmt: skip


def step_of(number: int) -> list[Operation]:
    """Ten milliseconds of its device: a gather that is half hidden, and one by nobody known."""
    host, device = 100.0 * number, 10.0 * number
    return [
        operation("kernel", host + 1, device, device + 2),
        operation("collective", host + 2, device + 1, device + 4, GATHER),
        operation("kernel", host + 50, device + 4, device + 8),
        operation("collective", host + 60, device + 8, device + 10, GATHER),
    ]


TIMELINE = [op for number in range(1, 6) for op in step_of(number)]
CALLS = HostCalls(
    callers=[(100 * number * MS + MS, "layers.0", "all_gather", "forward") for number in range(1, 6)],
    phases=sorted(
        span
        for number in range(1, 6)
        for span in (
            (100 * number * MS, (100 * number + 40) * MS, Phase.FORWARD),
            ((100 * number + 40) * MS, (100 * number + 90) * MS, Phase.BACKWARD),
        )
    ),
    step_ends={number: (100 * number + 95) * MS for number in range(1, 6)},
)


def test_steps_take_what_their_devices_take() -> None:
    """Not what this host takes: 100 ms. The first two and the last one are left out."""
    made = modelled_steps(rank(0).steps.recent, TIMELINE, CALLS)
    assert [one.step for one in made] == [3, 4]
    assert made[1].start_ns == made[0].end_ns
    for one in made:
        assert (one.seconds, one.communication_ns, one.exposed_ns) == (0.010, 5 * MS, 4 * MS)
        assert one.phase_ns[Phase.FORWARD] == 4 * MS and one.phase_exposed_ns[Phase.FORWARD] == 2 * MS
        assert one.phase_ns[Phase.BACKWARD] == 6 * MS and one.phase_exposed_ns[Phase.BACKWARD] == 2 * MS
        assert one.timed and not one.launch_ns


def test_a_rank_has_its_waits_by_unit() -> None:
    waits = waits_by_unit(TIMELINE, CALLS)
    assert [(row.unit, row.op, row.phase, row.calls) for row in waits] == [
        ("layers.0", "all_gather", "forward", 1), ("", "all_gather", "", 1),
    ]  # fmt: skip
    assert [row.exposed_seconds for row in waits] == pytest.approx([0.002, 0.002])
    made = modelled_steps(rank(0).steps.recent, TIMELINE, CALLS)
    shown = on_modelled_clock(rank(0), made, waits)
    assert shown.communication.exposed_ratio == 0.4
    assert shown.communication.overlap_ratio == pytest.approx(0.2)
    assert [row.seconds for row in shown.communication.traffic] == pytest.approx([0.003, 0.002])
    assert [row.count for row in shown.communication.traffic] == [2, 2]
    assert shown.steps.phase_seconds["backward"] == pytest.approx(0.012)
    untimed = on_modelled_clock(rank(0), [], waits)
    assert STEP.of_rank(untimed) is None, "not the time of this host"


def test_a_live_rank_on_a_virtual_device_shows_no_times_of_this_host() -> None:
    """Its steps, memory and counts are known; what they wait for is not, before the preflight ends."""
    real, virtual = state(device_name="NVIDIA H100"), state(device_name="NVIDIA H100 (virtual)")
    for made in (real, virtual):
        for number in range(1, 4):
            fold_event(made, step(number, number * 10, number * 10 + 10))
    timed, counted = summarize_rank(real), summarize_rank(virtual)
    assert timed.communication.exposed_ratio == 0.0
    assert counted.communication.exposed_ratio is None and counted.steps.last_step == 3
    assert counted.on_virtual_device and not timed.on_virtual_device
    assert exposed_unknown(counted) == "on modelled devices, this machine's times say nothing of it"
