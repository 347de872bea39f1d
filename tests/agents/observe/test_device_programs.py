"""The agent's own hooks and timer on the virtual device: the recorded exposed time is the schedule's.

hypothesis writes the programs, also those that tests/vgpu/test_steps.py cannot run: captures, a full
pool, loops without a step. Each mutant is a timer that is wrong on purpose: programs must find it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from device_programs import PROGRAMS, Program, Result, Ring, disagreement, run
from hypothesis import Phase, given, settings

from zeromon_agents.observe import device_timer
from zeromon_agents.observe.device_timer import DeviceTimer, Waited
from zeromon_agents.runtime.hook_context import EVENT

PROGRAMS_OF_A_MUTANT = 2000
"""At most; most mutants are found by one of the first twenty."""
WAITS_LATE: Program = [
    ("on", 1, [("issue", 0, 0, 100_000, True), ("wait", -1)]),
    ("step", True),
    ("on", 1, [("compute", 500_000)]),
    ("on", 3, [("compute", 300_000), ("issue", 1, 0, 100, True)]),
    ("on", 2, [("issue", 2, 0, 100, True)]),
    ("wait_stream", 1),
]
"""A stream is waited for after the events of its last wait were read. Random programs seldom do so."""


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Ring:
    return Ring(tmp_path_factory.mktemp("ring") / "r.ring")


def every_program(count: int, check: Callable[[Program], None], *phases: Phase) -> int:
    """Checks *count* programs, always the same ones, and returns how many were checked."""
    checked = 0

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases or (Phase.generate, Phase.shrink),
    )
    @given(PROGRAMS)
    def each(program: Program) -> None:
        nonlocal checked
        checked += 1
        check(program)

    each()
    return checked


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_the_recorded_exposed_time_is_that_of_the_schedule(ring: Ring, count: int) -> None:
    """Collectives on side streams, late waits, several groups, graph capture, loops without a step."""
    exposed = 0

    def check(program: Program) -> None:
        nonlocal exposed
        result = run(ring, program)
        assert not disagreement(result), disagreement(result)
        exposed += any(result.true.values())

    checked = every_program(count, check)
    print(f"{checked} programs, {exposed} of them with exposed communication: no disagreement")
    assert exposed > count // 4, "the programs expose nothing"


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_what_the_pool_does_not_hold_is_not_counted(
    ring: Ring, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More waits are pending than the pool takes: those beyond it have no record, never a wrong one."""
    monkeypatch.setattr(device_timer, "_POOL", 6)
    monkeypatch.setattr(device_timer, "_POLL_AT", 3)
    dropped = 0

    def check(program: Program) -> None:
        nonlocal dropped
        result = run(ring, program)
        wrong = too_much(result)
        assert not wrong, wrong
        dropped += sum(result.true.values()) > sum(result.recorded.values()) + 1

    every_program(count, check)
    assert dropped


def too_much(result: Result) -> str:
    """Returns where more is recorded than is true."""
    more = {
        unit: (time, result.true.get(unit, 0))
        for unit, time in result.recorded.items()
        if time > result.true.get(unit, 0) + 1
    }
    return result.faults or (f"more than is true: {more}" if more else "")


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_calls_that_take_time_add_no_more_than_that_time(ring: Ring, count: int) -> None:
    """On a stream without a backlog, the host's time between two events is in the record."""
    call_ns = 1500

    def check(program: Program) -> None:
        result = run(ring, program, call_ns=call_ns)
        assert not result.faults
        for unit in result.recorded.keys() | result.true.keys():
            error = result.recorded.get(unit, 0) - result.true.get(unit, 0)
            assert abs(error) <= 2 * call_ns * result.device.made, (unit, error)

    every_program(count, check)


# ---- mutants --------------------------------------------------------------------------------------


def wait_counted_twice(patch: pytest.MonkeyPatch) -> None:
    keep = DeviceTimer._keep

    def twice(self: Any, wait: Waited) -> None:
        keep(self, wait)
        if wait.entries:
            keep(self, wait)

    patch.setattr(DeviceTimer, "_keep", twice)


def event_on_the_wrong_stream(patch: pytest.MonkeyPatch) -> None:
    mark = DeviceTimer._mark
    patch.setattr(DeviceTimer, "_mark", lambda self, _=None: mark(self, self._device.streams[0]))


def capture_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceTimer, "captures", lambda _: False)
    patch.setattr(DeviceTimer, "reached_wait", lambda self, entries: (entries, self._mark()))


def poll_during_a_capture(patch: pytest.MonkeyPatch) -> None:
    poll = DeviceTimer.poll

    def always(self: Any) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(self._device, "is_current_stream_capturing", bool)
            poll(self)

    patch.setattr(DeviceTimer, "poll", always)


def event_used_again_before_it_was_read(patch: pytest.MonkeyPatch) -> None:
    keep = DeviceTimer._keep

    def early(self: Any, wait: Waited) -> None:
        keep(self, wait)
        self._free.append(wait.reached)

    patch.setattr(DeviceTimer, "_keep", early)


def poll_out_of_order(patch: pytest.MonkeyPatch) -> None:
    def poll(self: Any) -> None:
        if self._device.is_current_stream_capturing():
            return
        self._pending.reverse()
        while self._pending and self._pending[-1].left.query():
            wait = self._pending.popleft()
            self._write_done(wait) if wait.entries else self._write_stalls(wait)

    patch.setattr(DeviceTimer, "poll", poll)


def poll_does_not_ask(patch: pytest.MonkeyPatch) -> None:
    def poll(self: Any) -> None:
        while self._pending and not self._device.is_current_stream_capturing():
            wait = self._pending.popleft()
            self._write_done(wait) if wait.entries else self._write_stalls(wait)

    patch.setattr(DeviceTimer, "poll", poll)


def end_always_known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_timer, "_NO_STALL_NS", -1)


def synchronous_collective_not_timed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceTimer, "ran_here", lambda self, entry: None)


def issue_event_after_the_call(patch: pytest.MonkeyPatch) -> None:
    """The duration counts from the end of the wait's own event."""
    reached = DeviceTimer.reached_wait

    def late(self: Any, entries: Any) -> Any:
        timed = reached(self, entries)
        if timed is not None:
            entries[0][EVENT] = timed[1]
        return timed

    patch.setattr(DeviceTimer, "reached_wait", late)


MUTANTS = [
    wait_counted_twice,
    event_on_the_wrong_stream,
    capture_recorded,
    poll_during_a_capture,
    event_used_again_before_it_was_read,
    poll_out_of_order,
    poll_does_not_ask,
    end_always_known,
    synchronous_collective_not_timed,
    issue_event_after_the_call,
]


class Killed(Exception):
    """A program showed that the timer is wrong."""


def kill(ring: Ring, wrong: Callable[[Result], str]) -> None:
    def check(program: Program) -> None:
        try:
            found = wrong(run(ring, program))
        except Exception as error:
            raise Killed(str(error)) from error
        if found:
            raise Killed(found)

    with pytest.raises(Killed):
        check(WAITS_LATE)
        every_program(PROGRAMS_OF_A_MUTANT, check, Phase.generate)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_timer_that_is_wrong_on_purpose_is_found(
    ring: Ring, mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    kill(ring, disagreement)


def test_a_pool_that_counts_what_it_does_not_hold_is_found(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last wait that the pool holds lasts until those beyond it have ended."""
    monkeypatch.setattr(device_timer, "_POOL", 6)
    monkeypatch.setattr(device_timer, "_POLL_AT", 3)
    keep = DeviceTimer._keep

    def merged(self: Any, wait: Waited) -> None:
        keep(self, wait)
        if self._pending and self._pending[-1] is not wait:
            self._pending[-1].left = wait.left

    monkeypatch.setattr(DeviceTimer, "_keep", merged)
    kill(ring, too_much)


def test_a_hook_that_takes_a_captured_collective_for_one_of_the_host_is_found(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call takes microseconds of the host, and its collective does not run at all."""
    issued = DeviceTimer.issued

    def outside(self: Any, entry: Any) -> None:
        if not self._device.is_current_stream_capturing():
            issued(self, entry)

    monkeypatch.setattr(DeviceTimer, "captures", lambda _: False)
    monkeypatch.setattr(DeviceTimer, "issued", outside)
    kill(ring, disagreement)
