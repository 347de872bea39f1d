"""The virtual clock: what streams, events and links do, by schedules that can be computed by hand."""

from __future__ import annotations

import pytest

from zeromon_virtual.clock import Clock, Issue, Link

US = 1000


@pytest.fixture
def clock() -> Clock:
    return Clock()


def gather(clock: Clock, link: Link, nbytes: int) -> None:
    clock.unit, clock.phase = "block", "forward"
    clock.transfer("all_gather", link, nbytes, clock.current)


def test_a_stream_runs_its_work_in_order_and_not_before_the_host_has_enqueued_it(
    clock: Clock,
) -> None:
    clock.run("first", 10)
    clock.delay_host(3)
    clock.run("second", 10)
    clock.delay_host(30)
    clock.run("third", 10)
    assert [(work.start_ns, work.end_ns) for work in clock.compute.schedule] == [
        (0, 10), (10, 20), (33, 43),
    ]  # fmt: skip


def test_streams_run_beside_each_other_until_one_waits(clock: Clock) -> None:
    side = clock.stream()
    with clock.on(side):
        clock.run("copy", 50)
        copied = clock.Event()
        copied.record()
    clock.run("compute", 20)
    clock.compute.wait_event(copied)
    clock.run("compute", 20)
    assert (side.free_ns, clock.compute.free_ns) == (50, 70)
    assert clock.exposed_ns == {}, "the wait was for a kernel, not for a collective"


def test_a_link_carries_transfers_in_the_order_of_issue(clock: Clock) -> None:
    link, one, two = Link(10, 2), clock.stream(), clock.stream()
    for stream in (one, two):
        with clock.on(stream):
            gather(clock, link, 20)
    assert (one.free_ns, two.free_ns, link.free_ns) == (50, 100, 100)


def test_exposed_is_the_part_of_a_wait_in_which_the_other_stream_blocked_by_for_a_collective(
    clock: Clock,
) -> None:
    link, side = Link(0, 1), clock.stream()
    with clock.on(side):
        clock.run("copy in", 30)
        gather(clock, link, 40)
        clock.run("copy out", 5)
        done = side.record_event()
    clock.run("compute", 20)
    clock.compute.wait_event(done)
    # from 20 to 75: the copies until 30 and from 70 are not communication
    assert clock.exposed_ns == {Issue("all_gather", "block", "forward"): 40}


def test_a_collective_in_the_compute_stream_is_exposed_whole(clock: Clock) -> None:
    link = Link(0, 1)
    link.free_ns = 15
    clock.run("compute", 10)
    gather(clock, link, 40)
    assert clock.exposed_ns == {Issue("all_gather", "block", "forward"): 45}


def test_a_wait_through_two_streams_is_found(clock: Clock) -> None:
    link, one, two = Link(0, 1), clock.stream(), clock.stream()
    with clock.on(one):
        gather(clock, link, 40)
    two.wait_stream(one)
    clock.compute.wait_stream(two)
    assert clock.exposed_ns == {Issue("all_gather", "block", "forward"): 40}


def test_a_wait_is_split_between_the_collectives_that_the_stream_ran(clock: Clock) -> None:
    link, side = Link(0, 1), clock.stream()
    with clock.on(side):
        for unit, nbytes in (("b", 40), ("a", 50)):
            clock.unit = unit
            clock.transfer("reduce_scatter", link, nbytes, side)
    clock.run("compute", 30)
    clock.compute.wait_stream(side)
    assert {issue.unit: ns for issue, ns in clock.exposed_ns.items()} == {"b": 10, "a": 50}


def test_an_event_is_passed_once_the_host_has_come_so_far(clock: Clock) -> None:
    start, end = clock.Event(enable_timing=True), clock.Event(enable_timing=True)
    start.record()
    clock.run("compute", 7 * US)
    end.record()
    assert start.query() and not end.query()
    end.synchronize()
    assert end.query() and clock.host_ns == 7 * US
    assert start.elapsed_time(end) == 0.007
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(clock.Event())
