"""Which call a rank is in, and by which number, where hooks, the group and the Flight Recorder count."""

from __future__ import annotations

from builders import MS, folded, state, step

from zeromon.fold.collectives import REDUCER
from zeromon.fold.fold import fold_event
from zeromon.fold.state import RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.ring.codes import ExitKind, Flag, Op, Phase, Untimed
from zeromon.ring.events import Counted, Done, Event, Exit, GroupSequence, Issued
from zeromon.snapshot.communication import GroupProgress, InFlight


def issued(
    at_ms: float, op: Op, number: int, nbytes: int = 8, flags: int = 0, phase: Phase = Phase.OTHER
) -> Issued:
    return Issued(round(at_ms * MS), op, phase, flags, 1, 0, nbytes, number, 1)


def reduced(at_ms: float, nbytes: int, calls: int = 1) -> Counted:
    when = round(at_ms * MS)
    return Counted(when, Op.ALL_REDUCE, Phase.BACKWARD, 1, calls, nbytes, Untimed.REDUCER)


CONSTRUCTION = issued(1, Op.BROADCAST, 1, 1_052_672)


def newest(made: RankState) -> GroupProgress:
    return summarize_rank(made).communication.groups[0]


def flying(*events: Event, **meta: object) -> tuple[InFlight, ...]:
    return summarize_rank(folded(list(events), state(**meta))).communication.in_flight


def test_an_operation_has_the_number_of_its_own_call() -> None:
    """Under DDP the newest number is the reducer's; Python's last call was the constructor's."""
    made = folded([CONSTRUCTION, reduced(10, 4096), GroupSequence(11 * MS, 1, 66, 1)])
    now = newest(made)
    assert (now.sequence, now.op, now.nbytes, now.unit) == (66, "all_reduce", 4096, REDUCER)
    fold_event(made, issued(12, Op.BARRIER, 2))
    now = newest(made)
    assert (now.sequence, now.op, now.unit) == (67, "barrier", "")


def test_a_call_of_cpp_of_which_nothing_is_known_has_no_operation() -> None:
    unknown = Counted(10 * MS, Op.NONE, Phase.OTHER, 1, 65, 0, Untimed.IN_CPP)
    now = newest(folded([CONSTRUCTION, unknown, GroupSequence(11 * MS, 1, 66, 1)]))
    assert (now.sequence, now.op) == (66, "none")
    several = [CONSTRUCTION, reduced(10, 9000, calls=3), GroupSequence(11 * MS, 1, 66, 1)]
    assert (newest(folded(several)).op, newest(folded(several)).nbytes) == ("all_reduce", -1)


def test_the_flight_recorder_has_the_number_and_the_hook_the_operation() -> None:
    """gloo makes a reduce_scatter of an all_reduce, which its Flight Recorder names."""
    hooked = issued(20, Op.REDUCE_SCATTER, 2, 32_768)
    listed = issued(20.1, Op.ALL_REDUCE, 70, 32_768, Flag.INFERRED)
    (entry,) = flying(CONSTRUCTION, GroupSequence(10 * MS, 1, 69, 1), hooked, listed)
    assert (entry.op, entry.sequence) == ("reduce_scatter", 70)
    same = issued(20.1, Op.ALL_REDUCE, 2, 32_768, Flag.INFERRED)
    (entry,) = flying(hooked, same)
    assert (entry.op, entry.sequence) == ("reduce_scatter", 2)


def test_the_end_of_what_was_inferred_leaves_the_call_of_the_hook() -> None:
    hooked, listed = issued(20, Op.ALL_GATHER, 2), issued(20.1, Op.ALL_GATHER, 2, 8, Flag.INFERRED)
    over = Done(30 * MS, Op.ALL_GATHER, Phase.OTHER, Flag.INFERRED | Flag.FAILED, 1, 0, 0, 0, 0, 2)
    assert [entry.sequence for entry in flying(hooked, listed, over)] == [2]


def test_the_newest_call_of_a_control_step_has_the_number_of_the_group() -> None:
    """Idle hooks count without numbers."""
    control = issued(20, Op.BARRIER, 0, 0, Flag.INFERRED)
    (entry,) = flying(control, GroupSequence(21 * MS, 1, 248, 1))
    assert (entry.op, entry.sequence) == ("barrier", 248)


def test_the_call_that_raised_is_what_an_exception_ended() -> None:
    raised = Done(9 * MS, Op.ALL_REDUCE, Phase.OTHER, Flag.FAILED, 1, 0, 8, 2 * MS, 0, 3)
    events = [issued(2, Op.ALL_REDUCE, 3), raised]
    assert flying(*events) == ()
    (entry,) = flying(*events, Exit(10 * MS, ExitKind.EXCEPTION, 0))
    assert (entry.op, entry.sequence, entry.issued_ns) == ("all_reduce", 3, 2 * MS)
    caught = [*events, issued(10, Op.ALL_REDUCE, 4), Exit(99 * MS, ExitKind.EXCEPTION, 0)]
    assert [entry.sequence for entry in flying(*caught)] == [4]


def test_the_number_at_the_end_of_a_step_is_kept_while_steps_call_the_group() -> None:
    made = folded([GroupSequence(9 * MS, 1, 4, 4), step(1, 0, 10)])
    for number, sequence in ((2, 8), (3, 12)):
        fold_event(made, GroupSequence(number * 10 * MS, 1, sequence, sequence))
        fold_event(made, step(number, number * 10 - 10, number * 10))
    assert newest(made).step_sequence == 12
    fold_event(made, step(4, 30, 40))
    assert newest(made).step_sequence == -1
