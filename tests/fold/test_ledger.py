"""Every second in one cause: the arithmetic of the ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from builders import MS, span
from hypothesis import given, strategies as st

from zeromon.fold.fold import fold_event
from zeromon.fold.ledger import (
    LAUNCHER,
    Observed,
    ledger_rows,
    ledger_totals,
    startup_ns_by_part,
    with_lost_steps,
)
from zeromon.fold.state import RankState, Silence
from zeromon.readout.ledger import USEFUL
from zeromon.ring.codes import Activity, ExitKind, Flag, Op, Phase
from zeromon.ring.events import Done, Exit, Heartbeat, Issued, PhaseSpan, Start, StepMark
from zeromon.snapshot.ledger import Cause, LedgerRow


def state(*events: object, process_start_ms: float = 0) -> RankState:
    """A rank whose process began at *process_start_ms*, after *events*."""
    made = RankState(meta={"process_start_ns": round(process_start_ms * MS)})
    for event in events:
        fold_event(made, event)  # type: ignore[arg-type]
    return made


def step(number: int, start_ms: float, end_ms: float) -> StepMark:
    """The end of a step."""
    return StepMark(round(end_ms * MS), 0, number, round(start_ms * MS), 1)


def causes(rows: tuple[LedgerRow, ...]) -> dict[str, float]:
    """Milliseconds by cause."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums[str(row.cause)] += row.seconds
    return {cause: round(1e3 * seconds, 3) for cause, seconds in sums.items()}


SET_UP = Start(100 * MS, 0)


def test_a_phase_owns_its_time_without_the_phases_within_it() -> None:
    rank = state(
        SET_UP,
        span(Phase.DATA_WAIT, 100, 110),
        span(Phase.GARBAGE_COLLECTION, 120, 125),
        span(Phase.COMPILE, 126, 146),
        span(Phase.FORWARD, 110, 150),
        span(Phase.GARBAGE_COLLECTION, 155, 158),
        span(Phase.BACKWARD, 150, 180),
        span(Phase.CHECKPOINT, 185, 195),
        step(1, 100, 200),
    )
    assert causes(ledger_rows(rank)) == {
        "set_up": 100, "data": 10, "garbage_collection": 8, "compile": 20, "checkpoint": 10,
        "compute": 15 + 27, "other": 10,
    }  # fmt: skip


def test_an_evaluation_owns_its_batches_and_forwards_but_no_checkpoint() -> None:
    rank = state(
        SET_UP,
        span(Phase.DATA_WAIT, 110, 120),
        span(Phase.GARBAGE_COLLECTION, 122, 124),
        span(Phase.FORWARD, 120, 130),
        span(Phase.CHECKPOINT, 135, 150),
        span(Phase.EVALUATION, 105, 160),
        span(Phase.FORWARD, 160, 190),
        step(1, 100, 200),
    )
    assert causes(ledger_rows(rank)) == {
        "set_up": 100, "evaluation": 55 - 2 - 15, "garbage_collection": 2, "checkpoint": 15,
        "compute": 30, "other": 15,
    }  # fmt: skip
    assert rank.phase_ns[Phase.DATA_WAIT] == 0


def test_a_rollout_owns_its_forwards_and_counts_as_useful() -> None:
    rank = state(
        SET_UP,
        span(Phase.FORWARD, 110, 120),
        span(Phase.GENERATION, 105, 150),
        span(Phase.FORWARD, 150, 160),
        span(Phase.BACKWARD, 160, 190),
        step(1, 100, 200),
    )
    rows = ledger_rows(rank)
    assert causes(rows) == {"set_up": 100, "compute": 40, "generation": 45, "other": 15}
    assert sum(row.seconds for row in rows if row.cause in USEFUL) == pytest.approx(0.085)
    assert rank.activities[Phase.GENERATION, Activity.NONE, False].count == 1


def test_what_the_background_does_belongs_to_no_step() -> None:
    writing = PhaseSpan(190 * MS, Phase.CHECKPOINT, Flag.ASYNC, 110 * MS, Activity.SAVE, 7)
    rank = state(SET_UP, span(Phase.FORWARD, 100, 180), writing, step(1, 100, 200))
    assert causes(ledger_rows(rank)) == {"set_up": 100, "compute": 80, "other": 20}
    assert rank.activities[Phase.CHECKPOINT, Activity.SAVE, True].nbytes == 7
    assert rank.ledger.since_save_ns == 100 * MS, "it says nothing of when it was complete"


def test_steps_during_a_save_in_the_background_are_in_no_checkpoint() -> None:
    """Its end said that nothing was at risk."""
    rank = state(SET_UP, *(step(n, 100 * n, 100 * n + 100) for n in range(1, 5)))
    assert rank.ledger.unsaved_steps == 4
    fold_event(rank, PhaseSpan(510 * MS, Phase.CHECKPOINT, Flag.ASYNC, 350 * MS, Activity.SAVE, 7))
    assert (rank.ledger.unsaved_steps, rank.ledger.since_save_ns) == (2, 200 * MS)
    assert rank.ledger.checkpoints == 0


def test_the_files_of_one_checkpoint_are_one() -> None:
    def save(start_ms: float) -> PhaseSpan:
        end = round((start_ms + 5) * MS)
        return PhaseSpan(end, Phase.CHECKPOINT, Flag(0), round(start_ms * MS), Activity.SAVE)

    rank = state(SET_UP, save(100), save(106), step(1, 100, 200), save(200), save(206))
    assert (rank.ledger.checkpoints, rank.ledger.unsaved_steps) == (2, 0)


def test_set_up_is_without_what_has_a_cause_of_its_own() -> None:
    rank = state(span(Phase.COMPILE, 20, 50), span(Phase.CHECKPOINT, 60, 70), SET_UP)
    assert causes(ledger_rows(rank)) == {"set_up": 60, "compile": 30, "checkpoint": 10}


def test_each_second_of_the_set_up_is_in_one_part() -> None:
    """All of it was one row: nobody could tell a slow import from a slow rendezvous."""
    rank = state()
    rank.meta["set_up"] = {"launch": 10 * MS, "imports": 40 * MS, "process groups": 5 * MS, "x": 9}
    fold_event(rank, span(Phase.GARBAGE_COLLECTION, 62, 64))
    fold_event(rank, PhaseSpan(70 * MS, Phase.OTHER, Flag(0), 60 * MS, Activity.WRAP))
    fold_event(rank, span(Phase.DATA_WAIT, 90, 96))
    fold_event(rank, SET_UP)
    rows = ledger_rows(rank)
    assert {(str(r.cause), r.of): round(1e3 * r.seconds, 3) for r in rows} == {
        ("data", ""): 6, ("garbage_collection", ""): 2, ("set_up", "launch"): 10,
        ("set_up", "imports"): 40, ("set_up", "process groups"): 5,
        ("set_up", "model wrapping"): 8, ("set_up", "script"): 29,
    }  # fmt: skip
    parts = startup_ns_by_part(rank)
    assert sum(parts.values()) == rank.startup_ns == 100 * MS
    assert list(parts)[:2] == ["imports", "script"]
    assert ledger_totals(rank)["set_up"] == pytest.approx(0.092)
    rank.meta["set_up"] = {"imports": 500 * MS}
    assert causes(ledger_rows(rank))["set_up"] == 92, "a part is no longer than the set-up"


FAILED = Observed(alive=False, failed=True)


def silent(rank: RankState, cause: Cause, since_ms: int, of: str = "", counted_ms: int = 0) -> None:
    """What the collector notes of a rank without progress."""
    rank.silence = Silence(cause, of, since_ms * MS, counted_ms * MS)


def test_a_stall_and_a_hang_are_causes_while_they_last_and_after_the_end() -> None:
    rank = state(SET_UP, span(Phase.FORWARD, 100, 150), step(1, 100, 200))
    fold_event(rank, span(Phase.DATA_WAIT, 200, 220))
    fold_event(rank, Heartbeat(60_000 * MS, 0, Phase.FORWARD, 1))
    before = causes(ledger_rows(rank))
    assert before["compute"] == 50 + 60_000 - 220, "nobody has judged it yet"
    silent(rank, Cause.HANG, 220, "rank 1")
    lasts = ledger_rows(rank)
    assert causes(lasts) == {
        "set_up": 100, "compute": 50, "other": 50, "data": 20, "hang": 60_000 - 220,
    }  # fmt: skip
    assert next(row.of for row in lasts if row.cause is Cause.HANG) == "rank 1"
    assert causes(ledger_rows(rank, FAILED)) == {
        "set_up": 100, "compute": 50, "other": 50, "hang": 60_000 - 220, "lost": 20,
    }  # fmt: skip


def test_a_long_start_up_is_a_stall_only_after_two_minutes() -> None:
    """As the verdict has it, which calls it a start before."""
    for seconds, cause in ((60, "set_up"), (150, "stall")):
        rank = state(Heartbeat(seconds * 1000 * MS, 0, Phase.OTHER, 1))
        assert causes(ledger_rows(rank, FAILED)).get(cause, 0) > 0.9 * seconds * 1000, cause


def test_a_stall_that_nobody_saw_is_known_from_the_last_progress_of_a_failed_rank() -> None:
    rank = state(SET_UP, step(1, 100, 200), Heartbeat(60_000 * MS, 0, Phase.OTHER, 1))
    assert causes(ledger_rows(rank, FAILED))["stall"] == 60_000 - 200
    fold_event(rank, Issued(220 * MS, Op.ALL_REDUCE, Phase.BACKWARD, 0, 1, 0, 8, 1, 0))
    found = causes(ledger_rows(rank, FAILED))
    assert (found["hang"], found["lost"]) == (60_000 - 220, 20)


def test_a_hang_that_is_over_is_no_part_of_its_step() -> None:
    """Neither compute nor exposed communication, and no total ever decreases."""
    rank = state(SET_UP, step(1, 100, 200))
    fold_event(rank, Issued(250 * MS, Op.ALL_REDUCE, Phase.BACKWARD, 0, 1, 0, 8, 1, 0))
    silent(rank, Cause.HANG, 250, "rank 1", counted_ms=20_100)
    counted = ledger_totals(rank)
    assert counted["hang"] == pytest.approx(19.85)
    end = 20_000 * MS  # it ended before it was last counted
    fold_event(rank, Done(end, Op.ALL_REDUCE, Phase.BACKWARD, 0, 1, 0, 8, 250 * MS, end - 250 * MS, 1))
    assert rank.silence is None
    fold_event(rank, span(Phase.BACKWARD, 210, 20_200))
    for number in (2, 3):
        fold_event(rank, step(number, 200 + 20_100 * (number > 2), 20_300 + 100 * (number > 2)))
        totals = ledger_totals(rank)
        assert all(totals[cause] >= seconds - 1e-9 for cause, seconds in counted.items())
        counted = totals
    found = causes(ledger_rows(rank))
    assert found["hang"] == 20_100 - 250
    assert found["compute"] + found.get("exposed", 0) == pytest.approx(20_200 - 210 - 19_850)
    assert sum(found.values()) == pytest.approx(20_400)
    assert rank.ledger.since_save_ns == pytest.approx((20_400 - 100) * MS - 19_850 * MS)


def test_a_stall_before_the_first_step_is_no_set_up() -> None:
    rank = state(Heartbeat(50 * MS, 0, Phase.OTHER, 0))
    silent(rank, Cause.STALL, 50, counted_ms=70)
    rank.last_event_ns = 80 * MS
    assert causes(ledger_rows(rank)) == {"set_up": 50, "stall": 30}
    fold_event(rank, span(Phase.DATA_WAIT, 90, 95))
    fold_event(rank, SET_UP)
    assert causes(ledger_rows(rank)) == {"set_up": 100 - 45 - 5, "data": 5, "stall": 45}
    assert ledger_totals(rank) == {"data": 0.005, "set_up": 0.05, "stall": 0.045}


def test_the_ledger_goes_from_the_launch_to_the_end_of_the_run() -> None:
    """Of a rank that finished and of one that failed: the sum is the time of the run."""
    for failed, rest in ((False, "shut_down"), (True, "dead")):
        rank = state(
            Start(200 * MS, 100 * MS), span(Phase.FORWARD, 200, 280), step(1, 200, 300),
            Exit(340 * MS, ExitKind.EXCEPTION if failed else ExitKind.CLEAN, 0),
            process_start_ms=100,
        )  # fmt: skip
        whole = Observed(
            alive=False, failed=failed, since_ns=40 * MS, until_ns=900 * MS, died_ns=350 * MS
        )
        rows = ledger_rows(rank, whole)
        found = causes(rows)
        assert sum(found.values()) == pytest.approx(900 - 40)
        assert found[rest] == 550 + (0 if failed else 50)
        assert found.get("lost", 0) == (50 if failed else 0)
        launched = next(row.seconds for row in rows if row.of == LAUNCHER)
        assert launched == pytest.approx(0.06)
        assert sum(ledger_totals(rank, whole).values()) == pytest.approx(0.86)


def test_steps_that_are_taken_again_are_lost_but_not_their_checkpoint() -> None:
    rank = state(SET_UP)
    for number in range(1, 11):
        at = 100 * number
        fold_event(rank, span(Phase.FORWARD, at, at + 60))
        if number == 7:
            fold_event(rank, span(Phase.CHECKPOINT, at + 60, at + 90))
        fold_event(rank, step(number, at, at + 100))
    rows = ledger_rows(rank)
    after = with_lost_steps(rows, list(rank.history), 4)
    assert causes(after) == {
        "set_up": 100, "compute": 360, "other": 9 * 40 + 10 - 3 * 40 - 10, "checkpoint": 30,
        "lost": 4 * 60 + 3 * 40 + 10,
    }  # fmt: skip
    assert sum(row.seconds for row in after) == pytest.approx(sum(row.seconds for row in rows))
    many = with_lost_steps(rows, list(rank.history)[-2:], 5)
    assert causes(many)["lost"] == 500, "the steps that are not known count as the known ones"
    assert with_lost_steps(rows, [], 3) == rows


def test_totals_only_grow_and_leave_the_last_step_out() -> None:
    rank, before = state(SET_UP), {"set_up": 0.0}
    for number in range(1, 6):
        at = 100 * number
        fold_event(rank, span(Phase.FORWARD, at, at + 60))
        fold_event(rank, step(number, at, at + 100))
        totals = ledger_totals(rank)
        assert all(totals[cause] >= seconds for cause, seconds in before.items())
        before = totals
    assert before == {"compute": 0.24, "set_up": 0.1, "other": 0.16}


def test_exposed_time_is_split_by_dimension_and_by_the_rank_that_was_waited_for() -> None:
    rank = state(SET_UP)
    rank.groups[1] = {"label": "mesh_tp", "size": 2}
    row = rank.stats_row(Op.ALL_REDUCE, 1, Phase.FORWARD, 0)
    row.exposed_ns = 40 * MS
    row.matched_ns += 20 * MS
    row.waited_for(3, 15 * MS)
    fold_event(rank, span(Phase.FORWARD, 100, 190))
    fold_event(rank, step(1, 100, 200))
    rank.history[-1] = replace(rank.history[-1], phase_exposed_ns=(0, 40 * MS, *[0] * (len(Phase) - 2)))
    split = {(row.cause, row.of): round(1e3 * row.seconds, 3) for row in ledger_rows(rank)}
    assert split[Cause.WAITING, "rank 3"] == 30
    assert split[Cause.EXPOSED, "tp"] == 10
    assert split[Cause.COMPUTE, ""] == 50


@given(st.data())
def test_causes_sum_to_the_time_whatever_is_nested(data: st.DataObject) -> None:
    """Phases that nest in any way never count a moment twice."""
    rank, at = state(SET_UP), 100

    def nest(start: int, end: int, depth: int) -> None:
        moment = start
        while depth and moment < end and data.draw(st.booleans()):
            begin = data.draw(st.integers(moment, end))
            close = data.draw(st.integers(begin, end))
            nest(begin, close, depth - 1)
            moment = close
        fold_event(rank, span(data.draw(st.sampled_from(list(Phase)[1:])), start, end))

    for number in range(1, 4):
        length = data.draw(st.integers(1, 40))
        nest(at, at + length, 3)
        fold_event(rank, step(number, at, at + length))
        at += length
    assert sum(row.seconds for row in ledger_rows(rank)) == pytest.approx(at / 1e3)
