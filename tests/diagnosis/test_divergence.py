"""Ranks whose programs call different things, played: what is said while it lasts and after.

`play` is a backend in small: a call ends when both ranks have called the same operation and size under
its number, and the ranks stick at the first number where they have not. Every kind is judged while it
lasts, after the launcher was stopped, and from the rings alone, which do not say how a process ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from builders import rank, run
from evidence import row

from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.hangs import as_member, hangs_of
from zeromon.fold.collectives import REDUCER, group_call_histories
from zeromon.fold.fold import fold_event
from zeromon.fold.ledger import Observed
from zeromon.fold.state import RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.readout.text import run_state
from zeromon.readout.verdict import hang_headline, hang_text, judge_run
from zeromon.ring.codes import ExitKind, Flag, Op, Phase
from zeromon.ring.events import Done, Exit, GroupSequence, Heartbeat, Issued, PhaseSpan, StepMark
from zeromon.ring.strategy import Strategy
from zeromon.snapshot import Hang, RunSnapshot
from zeromon.snapshot.communication import CallHistory, GroupProgress, HangKind, InFlight, MemberCall
from zeromon.snapshot.focus import roles_of
from zeromon.snapshot.memory import KILLED_FOR_MEMORY
from zeromon.snapshot.run import DeathRole

MS, SECOND = 1_000_000, 1_000_000_000
UNEXPLAINED = "killed without a final record (SIGKILL or a crash)"
LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:4711"


class Call(NamedTuple):
    """A collective of one rank."""

    op: Op
    nbytes: int
    unit: str = ""
    phase: Phase = Phase.OTHER


STEP = None
"""The end of a step, in a program."""
Program = Sequence[Call | None]


def gathers(*units: str, phase: Phase = Phase.FORWARD, nbytes: int = 4096) -> list[Call]:
    return [Call(Op.ALL_GATHER, nbytes, unit, phase) for unit in units]


UNITS = ("0", "1", "2")
FORWARD = gathers(*UNITS)
BACKWARD = [
    *gathers(*reversed(UNITS), phase=Phase.BACKWARD),
    Call(Op.REDUCE_SCATTER, 12288, "bucket 0", Phase.BACKWARD),
]
TRAINS = [*FORWARD, *BACKWARD, STEP]
VOTE, BARRIER = Call(Op.ALL_REDUCE, 28), Call(Op.BARRIER, 0)


class Played(NamedTuple):
    """Two ranks that have stuck, or of which one has no more to call."""

    states: list[RankState]
    stuck_ns: int


def play(*programs: Program, steps: int = 20) -> Played:
    """Runs *steps* common steps, then the program of each rank, until a call cannot end."""
    plans = [[*TRAINS * steps, *program] for program in programs]
    states = [RankState(rank=number, pid=number + 1) for number in range(len(plans))]
    for state in states:
        state.groups[1] = {"label": "world", "size": len(plans), "ranks": [*range(len(plans))]}
        state.meta["world_size"] = len(plans)
    now, number, step = SECOND, 1, 0
    while True:
        ends = [plan.pop(0) if plan and plan[0] is STEP else 0 for plan in plans]
        if STEP in ends:
            step += 1
            for state in states:
                fold_event(state, GroupSequence(now, 1, number - 1, number - 1))
                fold_event(state, StepMark(now, 0, step, now - 7 * MS, 1))
            continue
        calls = [plan[0] if plan else None for plan in plans]
        for state, call in zip(states, calls, strict=True):
            if call is not None:
                fold_event(state, _issued(state, call, number, now))
        if None in calls or len({(c.op, c.nbytes) for c in calls if c}) > 1:
            return Played(states, now)
        now += MS
        for state, plan in zip(states, plans, strict=True):
            fold_event(state, _done(state, plan.pop(0), number, now))  # type: ignore[arg-type]
        number += 1


def _unit(state: RankState, name: str) -> int:
    if not name:
        return 0
    known = {unit: number for number, unit in state.units.items()}
    number = known.get(name, len(known) + 1)
    state.units[number] = name
    return number


def _issued(state: RankState, call: Call, number: int, now: int) -> Issued:
    unit = _unit(state, call.unit)
    return Issued(now, call.op, call.phase, 0, 1, unit, call.nbytes, number, 1)


def _done(state: RankState, call: Call, number: int, now: int, flags: int = 0) -> Done:
    unit = _unit(state, call.unit)
    flags |= Flag.SPAN_KNOWN
    return Done(now, call.op, call.phase, flags, 1, unit, call.nbytes, now - MS, MS, number)


def judged(
    played: Played, ends: Sequence[str], *, after_s: float = 30.0, over: bool = False,
    left_at_ns: int | None = None,
) -> RunSnapshot:  # fmt: skip
    """The run *after_s* seconds after it stuck; *ends*: how each rank ended, "" while it lives."""
    now = played.stuck_ns + round(after_s * SECOND)
    ranks = []
    for state, ended in zip(played.states, ends, strict=True):
        last = left_at_ns if ended == "finished" and left_at_ns is not None else now
        fold_event(state, Heartbeat(last, 0, state.phase, state.step))
        state.meta["stack"] = [] if ended == "finished" else [f"/home/me/t.py:3{state.rank} in main"]
        failed = ended not in ("", "finished")
        ranks.append(summarize_rank(state, Observed(alive=not ended, ended=ended, failed=failed)))

    def recent(group: str) -> list[CallHistory]:
        return [history for state in played.states for history in group_call_histories(state, group)]

    whole = run(*ranks, ended=over, taken_ns=now + (100 * SECOND if over else 0))
    object.__setattr__(whole, "hangs", hangs_of(map(as_member, ranks), whole.taken_ns, recent))
    return whole


MOMENTS: dict[str, Any] = {
    "live": {"ends": ("", "")},
    "stopped": {"ends": ("SIGTERM", "SIGTERM"), "over": True},
    "rings": {"ends": (UNEXPLAINED, UNEXPLAINED), "over": True},
}
ANSWER = gathers(*UNITS, phase=Phase.OTHER)
TEACHER = gathers("engine2:0", phase=Phase.OTHER, nbytes=9000)
ONE_FORWARD = [*FORWARD, *FORWARD, *BACKWARD]
MISMATCHES: dict[str, tuple[Program, Program, HangKind, str]] = {
    "skip": (
        [VOTE, *TRAINS], TRAINS, HangKind.MISMATCHED_OPERATIONS,
        "rank 0 called all_reduce (28 B), rank 1 called all_gather of unit 0 (4,096 B) in forward",
    ),
    "extra call": (
        [*gathers("0", nbytes=9), *TRAINS], TRAINS, HangKind.MISMATCHED_SIZES,
        "rank 0 called all_gather (9 B), rank 1 called all_gather (4,096 B)",
    ),
    "different operation": (
        [Call(Op.BROADCAST, 28)], [VOTE], HangKind.MISMATCHED_OPERATIONS,
        "rank 0 called broadcast (28 B), rank 1 called all_reduce (28 B)",
    ),
    "different size": (
        [VOTE], [Call(Op.ALL_REDUCE, 64)], HangKind.MISMATCHED_SIZES,
        "rank 0 called all_reduce (28 B), rank 1 called all_reduce (64 B)",
    ),
    "different unit of equal size": (
        [*gathers("0", "3", "out"), *BACKWARD], [*gathers("0", "out"), *BACKWARD],
        HangKind.MISMATCHED_UNITS,
        "since #142: rank 0 called all_gather of unit 3 (4,096 B), rank 1 called all_gather of out "
        "(4,096 B)",
    ),
    "one forward ahead": (
        ONE_FORWARD, TRAINS, HangKind.MISMATCHED_UNITS,
        "since #144: rank 0 called all_gather of unit 0 (4,096 B) in forward, rank 1 called all_gather "
        "of unit 2 (4,096 B) in backward; rank 0 is one forward ahead",
    ),
    "a longer answer": (
        [*ANSWER * 3, *TEACHER, *TRAINS], [*ANSWER * 4, *TEACHER, *TRAINS],
        HangKind.MISMATCHED_SIZES,
        "rank 0 called all_gather of engine2:0 (9,000 B), rank 1 called all_gather of unit 0 (4,096 B); "
        "rank 1 runs one more forward of the same modules",
    ),
    "uneven batches": (
        [BARRIER], TRAINS, HangKind.MISMATCHED_OPERATIONS,
        "rank 0 called barrier (0 B), rank 1 called all_gather of unit 0 (4,096 B) in forward; rank 0 "
        "ended step 20 and has begun no other",
    ),
}  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", MISMATCHES)
def test_the_first_difference_is_found(kind: str, moment: str) -> None:
    first, second, expected, words = MISMATCHES[kind]
    snapshot = judged(play(first, second), **MOMENTS[moment])
    (hang,) = snapshot.hangs
    assert hang.kind is expected
    assert round(hang.seconds) == 30
    headline = hang_headline(snapshot, hang)
    assert words in headline
    assert headline.startswith("hung at step 21 for 30 s: " if moment != "live" else str(expected))
    assert any(f.code == "ZM002" and f.severity == "critical" for f in advise(snapshot))


@pytest.mark.parametrize("moment", ["live", "stopped"])
def test_different_operations_have_no_common_name_and_each_has_its_line(moment: str) -> None:
    """Rank 0 is in the barrier: the finding must not begin with the all_gather of rank 1."""
    first, second, *_ = MISMATCHES["uneven batches"]
    snapshot = judged(play(first, second), **MOMENTS[moment])
    (found,) = (f.text for f in advise(snapshot) if f.code == "ZM002")
    assert found.startswith("collective #141 of ")
    assert "rank 0 called barrier (0 B) (at t.py:30), rank 1 called all_gather" in found
    assert "in forward (at t.py:31)" in found


def test_an_earlier_difference_has_no_line() -> None:
    """The stacks show where the ranks are now, not where they called different things."""
    first, second, *_ = MISMATCHES["one forward ahead"]
    snapshot = judged(play(first, second), **MOMENTS["live"])
    (found,) = (f.text for f in advise(snapshot) if f.code == "ZM002")
    assert "since #144" in found and "t.py" not in found


@pytest.mark.parametrize("kind", MISMATCHES)
def test_the_first_difference_is_found_after_a_death(kind: str) -> None:
    """gloo raises on one rank at once and aborts the other: nothing hangs, and no number need agree."""
    first, second, expected, words = MISMATCHES[kind]
    played = play(first, second)
    raised = played.states[1]
    record = raised.group_calls[1].last
    call = Call(Op(record[2] >> 8 & 255), record[3])
    fold_event(raised, _done(raised, call, record[4], played.stuck_ns + MS, Flag.FAILED))
    raised.texts[1] = LOST
    fold_event(raised, Exit(played.stuck_ns + 2 * MS, ExitKind.EXCEPTION, 1))
    snapshot = judged(played, ("SIGABRT", "exception"), after_s=0.1, over=True)
    (hang,) = snapshot.hangs
    assert (hang.kind, hang.seconds) == (expected, 0.0)
    assert words.partition(": ")[2 if words.startswith("since") else 0] in hang_text(snapshot, hang)
    assert any(f.code == "ZM003" and f.severity == "critical" for f in advise(snapshot))


def test_a_number_may_differ_by_one_where_the_ranks_died() -> None:
    """One rank has gone on to its next call when the other aborts in the one before."""
    played = play(MISMATCHES["one forward ahead"][0], TRAINS)
    ahead = played.states[0]
    last = ahead.group_calls[1].last[4]
    later = Call(Op.ALL_GATHER, 777, "1", Phase.FORWARD)
    fold_event(ahead, _issued(ahead, later, last + 1, played.stuck_ns + MS))
    snapshot = judged(played, ("SIGABRT", "SIGABRT"), after_s=0.1, over=True)
    (hang,) = snapshot.hangs
    assert "rank 0 is one forward ahead" in hang_headline(snapshot, hang)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_never_calls_is_named_with_its_line(moment: str) -> None:
    snapshot = judged(play([VOTE], []), **MOMENTS[moment])
    (hang,) = snapshot.hangs
    assert (hang.kind, hang.waiting, hang.missing) == (HangKind.MISSING_MEMBER, (0,), (1,))
    assert hang_headline(snapshot, hang) == (
        "all_reduce in world is stuck: rank 1 has not called it (at t.py:31); rank 0 waits"
        if moment == "live"
        else "hung at step 21 for 30 s: rank 1 never called all_reduce (t.py:31)"
    )


_LEFT_ALONE = "all_reduce in world is stuck: rank 1 has left after step 20 (exit code 0); rank 0 waits"
_HAD_LEFT = "rank 1 had left after step 20 (exit code 0)"


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (("", "finished"), _LEFT_ALONE),
        (("SIGTERM", "finished"), f"hung at step 21 for 30 s: {_HAD_LEFT}"),
        ((UNEXPLAINED, "finished"), f"hung at step 21 for 30 s: {_HAD_LEFT}"),
    ],
)
def test_a_member_that_left_is_named(ends: tuple[str, str], words: str) -> None:
    played = play([VOTE], [])
    snapshot = judged(
        played, ends, over=all(ends), left_at_ns=played.stuck_ns - MS,
    )  # fmt: skip
    (hang,) = snapshot.hangs
    assert (hang.kind, hang.dead) == (HangKind.LEFT_MEMBER, (1,))
    assert hang_headline(snapshot, hang) == words
    if ends[0] == UNEXPLAINED:
        assert roles_of(snapshot) == {0: DeathRole.VICTIM, 1: DeathRole.CULPRIT}


def test_it_is_not_waited_for_a_member_that_left() -> None:
    played = play([VOTE], [])
    early = judged(played, ("", "finished"), after_s=4, left_at_ns=played.stuck_ns - MS)
    assert [hang.kind for hang in early.hangs] == [HangKind.LEFT_MEMBER]
    played = play([VOTE], [])
    assert judged(played, ("", ""), after_s=4).hangs == ()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_without_more_batches_is_named(moment: str) -> None:
    played = play([BARRIER], TRAINS)
    now = played.stuck_ns - MS
    fold_event(played.states[0], PhaseSpan(now, Phase.DATA_WAIT, Flag.FAILED, now - MS))
    snapshot = judged(played, **MOMENTS[moment])
    assert "; rank 0 had no more batches after step 20" in hang_headline(snapshot, snapshot.hangs[0])
    fold_event(played.states[0], PhaseSpan(now + MS, Phase.DATA_WAIT, 0, now))  # a new epoch
    again = judged(played, ("", ""))
    assert "batches" not in hang_headline(again, again.hangs[0])


def lost_peer(played: Played, number: int) -> None:
    """A rank whose connection was closed, in C++: no hook has seen the call."""
    state = played.states[number]
    state.texts[1] = LOST
    fold_event(state, Exit(played.stuck_ns + 2 * MS, ExitKind.EXCEPTION, 1))


def test_a_rank_that_leaves_while_others_train_is_the_cause() -> None:
    played = play([], [])
    lost_peer(played, 1)
    snapshot = judged(
        played, ("finished", "exception"), after_s=0.1, over=True, left_at_ns=played.stuck_ns
    )
    assert roles_of(snapshot) == {0: DeathRole.CULPRIT, 1: DeathRole.VICTIM}
    assert run_state(snapshot) == "died: rank 0 left after step 20 (exit code 0); rank 1 died of it"
    told = {f.rank: (f.severity, f.text) for f in advise(snapshot) if f.code == "ZM001"}
    assert told[0] == ("critical", "left after step 20 (exit code 0) while rank 1 trained in step 21")
    assert told[1][0] == "info"
    assert told[1][1].endswith("it died of rank 0")


def test_a_rank_that_ends_a_little_earlier_is_not_accused() -> None:
    played = play([], [])
    ended = judged(played, ("finished", "finished"), over=True, left_at_ns=played.stuck_ns)
    assert (roles_of(ended), ended.hangs) == ({}, ())
    played = play([], [])
    ends = judged(played, ("finished", ""), after_s=60, left_at_ns=played.stuck_ns)
    assert (roles_of(ends), ends.hangs) == ({}, ())
    played = play([], [])
    fails = judged(played, ("finished", "exit code 1"), over=True, left_at_ns=played.stuck_ns)
    assert roles_of(fails) == {1: DeathRole.CULPRIT}


@pytest.mark.parametrize("other", ["SIGTERM", "SIGABRT", "SIGKILL"])
def test_the_first_death_is_the_cause_and_the_later_its_consequence(other: str) -> None:
    """The launcher kills what does not end by itself; a backend aborts where a peer is gone."""
    played = play([VOTE], [])
    snapshot = judged(played, ("", "SIGKILL"), after_s=0)
    fold_event(played.states[0], Heartbeat(played.stuck_ns + 9 * SECOND, 0, Phase.OTHER, 20))
    late = summarize_rank(played.states[0], Observed(alive=False, ended=other, failed=True))
    dead = run(late, snapshot.ranks[1], ended=True)
    assert roles_of(dead) == {0: DeathRole.VICTIM, 1: DeathRole.CULPRIT}
    assert run_state(dead) == "died: rank 1, SIGKILL, after step 20; rank 0 died of it"


def test_a_timeout_blames_the_rank_that_never_called() -> None:
    """The waiting rank raises after half an hour, and the launcher stops the other."""
    played = play([VOTE], [])
    waits = played.states[0]
    record, now = waits.group_calls[1].last, played.stuck_ns + 1800 * SECOND
    fold_event(waits, _done(waits, VOTE, record[4], now, Flag.FAILED))
    waits.texts[1] = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
    fold_event(waits, Exit(now, ExitKind.EXCEPTION, 1))
    snapshot = judged(played, ("exception", "SIGTERM"), after_s=1800.5, over=True)
    (hang,) = snapshot.hangs
    assert hang_headline(snapshot, hang) == (
        "hung at step 21 for 30 min: rank 1 never called all_reduce (t.py:31)"
    )
    assert roles_of(snapshot) == {0: DeathRole.VICTIM, 1: DeathRole.CULPRIT}


@pytest.mark.parametrize("how", ["SIGKILL", KILLED_FOR_MEMORY])
def test_the_rank_that_the_launcher_stops_did_not_kill_the_one_that_waits(how: str) -> None:
    """Somebody kills the waiting rank of a hang; the launcher then sends SIGTERM to the missing one."""
    played = play([VOTE], [])
    snapshot = judged(played, (how, "SIGTERM"), after_s=60, over=True)
    (hang,) = snapshot.hangs
    assert (hang.waiting, hang.missing or hang.dead) == ((0,), (1,))
    assert roles_of(snapshot) == {0: DeathRole.CULPRIT, 1: DeathRole.VICTIM}
    assert run_state(snapshot) == f"died: rank 0, {how}, after step 20; rank 1 died of it"


def test_ranks_that_name_their_units_differently_are_not_accused() -> None:
    """Experts of one group are called differently on each rank, in every step."""
    own = [*gathers("experts.0"), STEP] * 30, [*gathers("experts.1"), STEP] * 30
    played = play([*own[0], VOTE], own[1], steps=0)
    (hang,) = judged(played, ("", "")).hangs
    assert hang.kind is HangKind.MISSING_MEMBER


def test_all_inside_takes_the_number_and_the_call_of_every_member() -> None:
    played = play([VOTE], [BARRIER])  # stuck; then both are said to be in the vote
    one = played.states[1].group_calls[1]
    one.in_flight.clear()
    one.recent.pop()
    fold_event(
        played.states[1], _issued(played.states[1], VOTE, played.states[0].group_calls[1].last[4], 0)
    )
    (hang,) = judged(played, ("", "")).hangs
    assert hang.kind is HangKind.ALL_INSIDE


@pytest.mark.parametrize(
    ("ended", "reached", "named"),
    [("SIGABRT", 75, True), ("SIGABRT", 73, True), ("SIGKILL", 75, False), ("SIGABRT", 72, False)],
)
def test_a_call_that_met_ddps_reducer_is_named(ended: str, reached: int, named: bool) -> None:
    """Rank 0 skips a vote: its next bucket, counted or not yet, meets that of rank 1, which aborts."""
    group = GroupProgress(
        group_id="g", label="world", ranks=(0, 1), sequence=74, op="all_reduce", nbytes=28
    )
    bucket = replace(group, sequence=reached, nbytes=-1, unit=REDUCER, phase="backward")
    vote = InFlight(
        op="all_reduce", group="world", group_id="g", sequence=74, unit="", phase="other", nbytes=28,
        issued_ns=1,
    )  # fmt: skip
    dead = {"alive": False, "failed": True}
    lost = {**dead, "ended": "exception", "exception": "Connection reset by peer"}
    aborted = {**dead, "ended": ended, "in_flight": (vote,)}
    ranks = rank(0, groups=(bucket,), **lost), rank(1, groups=(group,), **aborted)
    snapshot = replace(run(*ranks, ended=True), hangs=hangs_of(map(as_member, ranks), 100))
    met = "rank 1 called all_reduce (28 B), rank 0 called all_reduce of DDP's reducer in backward"
    assert judge_run(snapshot).cause.startswith(f"mismatched units in world: {met}") is named


@pytest.mark.parametrize(
    ("strategy", "sampler", "unit", "change"),
    [
        ("ddp", "_InfiniteConstantSampler", "bucket 0", "with model.join()"),
        ("ddp", "_InfiniteConstantSampler", "", "islice(loader, fewest)"),
        ("ddp", "SequentialSampler", "", "islice(loader, min(counts))"),
        ("fsdp2", "SequentialSampler", "0", "islice(loader, min(counts))"),
        ("fsdp2", "", "0", "islice(loader, fewest)"),
    ],
)
@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_unequal_batches_come_with_a_change_that_fits_the_program(
    strategy: str, sampler: str, unit: str, change: str, seconds: float
) -> None:
    """DDP's join answers DDP's collectives alone; without a length no rank can count its batches."""
    traffic = (row("all_reduce", unit, "backward"),)
    facts: dict[str, Any] = {
        "strategy": strategy, "strategy_fields": Strategy.parse(strategy),
        "loader": {"sampler": sampler}, "traffic": traffic,
    }  # fmt: skip
    calls = (
        MemberCall(rank=0, sequence=9, op="barrier", nbytes=4),
        MemberCall(rank=1, sequence=9, op="all_reduce", nbytes=4),
    )
    hang = Hang(
        kind=HangKind.MISMATCHED_OPERATIONS, op="barrier", group="dp", group_id="1", sequence=9,
        nbytes=4, seconds=seconds, waiting=(0, 1), calls=calls, members=(0, 1),
    )  # fmt: skip

    def remedy_where(*empty: int) -> str | None:
        ranks = [rank(n, out_of_batches=n in empty, **facts) for n in (0, 1)]
        (found,) = (
            f for f in advise(replace(run(*ranks), hangs=(hang,))) if f.code in ("ZM002", "ZM003")
        )
        return found.remedy.diff if found.remedy is not None else None

    assert change in (remedy_where(0) or "")
    assert remedy_where() is None and remedy_where(0, 1) is None
