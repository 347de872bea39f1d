"""Spans of the last steps, against the fold's seconds of the same steps, on recorded runs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from recordings import RINGS

from zeromon.fold.fold import fold_event
from zeromon.fold.lanes import LAG_STEPS, lanes_of_rings, node_clock_shifts
from zeromon.fold.state import RankState
from zeromon.ring.slices import RingEvents, run_events
from zeromon.snapshot import StepSummary
from zeromon.snapshot.intervals import common_set, set_length, union_set
from zeromon.snapshot.step import Lanes, LaneSpan, Stream

ONE_CLOCK = {0: 0, 1: 0}
RECORDED = ("exposed-fsdp2-off", "exposed-zero2", "healthy-ddp", "healthy-zero3", "straggler-data")


@cache
def rings(name: str) -> tuple[RingEvents, ...]:
    return tuple(run_events("no live run", RINGS / name))


def folded(ring: RingEvents) -> dict[int, StepSummary]:
    state = RankState(rank=ring.rank, units=dict(ring.units))
    for event in ring.events:
        fold_event(state, event)
    return {step.step: step for step in state.history}


def of_step(lanes: Lanes, rank: int, step: int) -> list[LaneSpan]:
    return [s for s in lanes.spans if (s.rank, s.step, s.stream) == (rank, step, Stream.COMMUNICATION)]


@pytest.mark.parametrize("name", RECORDED)
def test_the_spans_of_a_step_cover_the_seconds_that_the_fold_has(name: str) -> None:
    """Communication, exposed time, and what has no time, step by step and rank by rank."""
    lanes = lanes_of_rings(rings(name), ONE_CLOCK, steps=20)
    assert lanes.left_out == () and len(lanes.steps) == 2 * 20
    summaries = {ring.rank: folded(ring) for ring in rings(name)}
    for one in lanes.steps:
        expected, own = summaries[one.rank][one.step], of_step(lanes, one.rank, one.step)
        communication = union_set((s.begin_ns, s.end_ns) for s in own)
        blocked = union_set((s.end_ns - s.exposed_ns, s.end_ns) for s in own if not s.on_device)
        exposed = set_length(common_set(blocked, communication)) + one.unplaced_ns
        exposed += sum(s.exposed_ns for s in own if s.on_device)
        assert set_length(communication) == expected.communication_ns, one
        assert exposed == expected.exposed_ns, one
        assert one.untimed == expected.untimed, one
        assert (one.begin_ns, one.end_ns) == (expected.start_ns, expected.end_ns)
    assert any(s.exposed_ns for s in lanes.spans)


def test_collectives_are_named_by_unit_and_group() -> None:
    lanes = lanes_of_rings(rings("straggler-data"), ONE_CLOCK)
    named = {(s.name, s.unit, s.group) for s in lanes.spans if s.stream is Stream.COMMUNICATION}
    assert {("all_gather", f"layers.{n}", "world") for n in range(3)} <= named
    assert {"forward", "backward"} <= {s.name for s in lanes.spans if s.stream is Stream.COMPUTE}


def test_the_slow_rank_came_last() -> None:
    """Rank 1 has a slow loader, so the others wait for it each step; control steps have no times."""
    lanes = lanes_of_rings(rings("straggler-data"), ONE_CLOCK, steps=20)
    timed = {s.step for s in lanes.spans if s.stream is Stream.COMMUNICATION}
    assert timed == {one.step for one in lanes.arrivals} and len(timed) == 18
    for step in timed:
        mine = [one for one in lanes.arrivals if one.step == step]
        longest = max(mine, key=lambda one: one.at_ns - one.first_ns)
        assert (longest.rank, longest.first_rank) == (1, 0)
        assert longest.at_ns - longest.first_ns > 5_000_000


def test_clocks_of_two_nodes_are_aligned() -> None:
    """A rank whose clock is ahead is at the same place of the timeline once it is shifted."""
    first, second = rings("straggler-data")
    ahead = 5_000_000_000
    events = [
        event._replace(
            **{
                name: getattr(event, name) + ahead
                for name in ("t_ns", "start_ns", "issued_ns", "compute_end_ns")
                if name in event._fields
            }
        )
        for event in second.events
    ]
    same = lanes_of_rings([first, replace(second, events=events)], {0: 0, 1: -ahead}, steps=3)
    assert same == lanes_of_rings([first, second], ONE_CLOCK, steps=3)


def test_what_a_limit_leaves_out_is_told() -> None:
    pair = rings("exposed-fsdp2-off")
    few = lanes_of_rings(pair, ONE_CLOCK, steps=2, max_spans=10)
    assert len(few.spans) == 10 and few.left_out[-1].endswith("spans: the 10 longest are shown")
    assert lanes_of_rings(pair, ONE_CLOCK, steps=50).left_out == ("30 steps: at most 20 are shown",)
    one = lanes_of_rings(pair, {0: 0})
    assert one.left_out == ("1 rank of other nodes: the clocks are not aligned",)
    assert {s.rank for s in one.spans} == {0} and one.arrivals == ()
    crowd = [replace(pair[0], rank=n) for n in range(66)]
    shown = lanes_of_rings(crowd, dict.fromkeys(range(66), 0))
    assert shown.left_out == ("2 ranks: at most 64 are shown",)
    empty = lanes_of_rings([replace(pair[0], events=[])], {0: 0})
    assert empty.spans == () and empty.left_out == ("1 rank: no whole step in the ring",)
    assert {s.rank for s in lanes_of_rings(pair, ONE_CLOCK, ranks=[1]).spans} == {1}


@pytest.mark.parametrize("name", RECORDED)
def test_the_end_of_a_ring_has_the_last_steps_whole(name: str) -> None:
    """A live view reads no more of a ring than its last steps."""
    ends = tuple(run_events("no live run", RINGS / name, 3 + LAG_STEPS))
    assert sum(len(ring.events) for ring in ends) < sum(len(ring.events) for ring in rings(name))
    assert lanes_of_rings(ends, ONE_CLOCK, steps=3) == lanes_of_rings(rings(name), ONE_CLOCK, steps=3)


def test_ranks_of_another_node_have_another_clock() -> None:
    first, second = rings("straggler-data")
    assert node_clock_shifts([first, second]) == ONE_CLOCK
    booted_later = second.wall_minus_mono_ns + 7_000_000_000
    crowd = [first, replace(first, rank=2), replace(second, wall_minus_mono_ns=booted_later)]
    assert node_clock_shifts(crowd) == {0: 0, 2: 0}


def test_of_two_attempts_of_a_rank_the_later_one_is_shown() -> None:
    first, second = rings("straggler-data")
    older = replace(first, wall_minus_mono_ns=first.wall_minus_mono_ns - 1, events=first.events[:50])
    assert lanes_of_rings([first, second, older], ONE_CLOCK) == lanes_of_rings(
        [first, second], ONE_CLOCK
    )
