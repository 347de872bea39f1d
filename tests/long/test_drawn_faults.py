"""The draw of faults and the judge of what is said of them."""

from __future__ import annotations

import ast
import importlib.util
from typing import Any

import pytest
from drawn_faults import (
    ALL_RANKS,
    FAULTS,
    HEALTHY,
    KINDS,
    LOADINGS,
    LOADS,
    STRATEGIES,
    Case,
    draw,
    draw_healthy,
)
from evidence_pages import entry_faults, read_entries
from judge import EXPECTED, Line, Mark, accusations, flips, judge, judge_live, share
from support import PROGRAMS, ROOT


def case(kind: str, rank: int = 1, step: int = 40) -> Case:
    return Case(1, kind, "ddp", "none", 1, rank, step)


def test_one_seed_draws_the_same_cases_and_another_draws_others() -> None:
    assert draw(7, 50) == draw(7, 50)
    assert draw(7, 50) != draw(8, 50)
    assert draw(7, 50) == draw(7, 200)[:50]
    assert draw_healthy(7, 20) != draw_healthy(8, 20)


def test_the_draw_covers_all_kinds_strategies_and_ways_to_load() -> None:
    cases = draw()
    assert len(cases) == 200
    assert {drawn.kind for drawn in cases} == set(KINDS)
    assert {drawn.strategy for drawn in cases} == set(STRATEGIES)
    assert {drawn.loading for drawn in cases} == set(LOADINGS)
    assert {drawn.rank for drawn in cases} == {ALL_RANKS, 0, 1}
    assert {drawn.accumulation for drawn in cases} == {1, 3}
    assert len({drawn.name for drawn in cases}) == 200
    assert sum(drawn.is_healthy for drawn in cases) < 40


@pytest.mark.parametrize("seed", range(5))
def test_a_case_has_only_what_its_kind_allows(seed: int) -> None:
    for drawn in draw(seed, 300):
        kind = KINDS[drawn.kind]
        assert drawn.strategy in kind.strategies
        assert drawn.loading in kind.loadings
        assert drawn.rank in kind.ranks
        assert drawn.amount in kind.amounts
        assert drawn.strategy != "trainer" or drawn.loading != "none"


def test_false_alarms_are_sought_in_healthy_runs_beside_all_loads() -> None:
    cases = draw_healthy()
    assert len(cases) == 40
    assert {drawn.kind for drawn in cases} == set(HEALTHY)
    assert {drawn.load for drawn in cases} == set(LOADS)


def test_each_fault_is_expected_and_is_in_the_program() -> None:
    assert set(EXPECTED) == set(FAULTS)
    program = ast.parse((PROGRAMS / "drawn.py").read_text())
    described = ast.get_docstring(program)
    assert described is not None
    assert [kind for kind in KINDS if kind not in described] == []


LATE = "slow: rank 1 is late by 80 ms per step (own code) since step 41"


@pytest.mark.parametrize(
    ("kind", "text", "mark"),
    [
        ("late_between", LATE, Mark.RIGHT),
        ("late_between", LATE.replace("41", "20"), Mark.PARTLY),
        ("late_between", LATE.replace("rank 1", "rank 0"), Mark.WRONG),
        ("late_between", "slow: 54 % of a step waits for communication", Mark.SILENT),
        ("late_between", "healthy: no memory is running out", Mark.SILENT),
        ("hiccup", "slow: rank 1 pauses for 1 s every 12 steps; others wait", Mark.RIGHT),
        ("hiccup", "slow: rank 1: the others wait 59 ms per step for it", Mark.PARTLY),
        ("stall_all", "stalled: no step has ended for 19 s", Mark.RIGHT),
        ("stall_all", "healthy: no memory is running out", Mark.WRONG),
        ("sleeps", "stalled: all_reduce does not end: 1 wait, rank 1 missing", Mark.RIGHT),
        ("sleeps", "stalled: all_reduce does not end: 1 wait, rank 0 missing", Mark.WRONG),
        ("sleeps", "stalled: all_reduce in dp (ranks 0, 1) does not end", Mark.PARTLY),
        ("sleeps", "stalled: all_reduce does not end: rank 1 waits", Mark.PARTLY),
        ("skipped", "stalled: mismatched operations: rank 0: a; rank 1: b", Mark.RIGHT),
        ("exception", "dead: rank 1: exception after step 40", Mark.RIGHT),
        ("killed", "dead: rank 1: SIGKILL after step 40", Mark.RIGHT),
        ("killed", "dead: rank 0: exception after step 40", Mark.WRONG),
        ("exit_zero", "dying: rank 1 left with code 0 after step 40", Mark.RIGHT),
        ("exit_zero", "dead: rank 0: exception after step 40", Mark.WRONG),
        ("slow_start", "starting: no step has ended for 12 s", Mark.RIGHT),
        ("slow_start", "starting: no step has ended yet", Mark.SILENT),
        ("slow_start", "stalled: no step has ended for 12 s", Mark.WRONG),
        ("healthy", "slow: 30 % of a step waits for communication", Mark.RIGHT),
        ("healthy", "slow: rank 1: the others wait 14.1 ms per step for it", Mark.WRONG),
        ("healthy", "slow: rank 1: its main thread had no CPU for 30 %", Mark.RIGHT),
        ("healthy", "at risk: host memory runs out", Mark.WRONG),
    ],
)
def test_a_live_line_is_judged_by_cause_and_rank(kind: str, text: str, mark: Mark) -> None:
    judged = judge(case(kind), text, is_live=True)
    assert judged.mark is mark, judged


@pytest.mark.parametrize(
    ("kind", "first", "verdict", "mark"),
    [
        ("sleeps", "stopped by SIGTERM after step 39", "stopped: by SIGTERM", Mark.SILENT),
        ("sleeps", "stopped by SIGTERM", "hung for 18 s: rank 1 never called it", Mark.RIGHT),
        ("exception", "died: rank 1, exception, after step 39", "dead: exception", Mark.PARTLY),
        ("exception", "died: rank 1", "dead: rank 1: ValueError: label 99", Mark.RIGHT),
        ("late_between", "finished after 90 steps", f"{LATE}; finished", Mark.RIGHT),
        ("late_between", "finished after 90 steps", "finished: 58 % of a step", Mark.SILENT),
        ("killed", "died: rank 1, SIGKILL; rank 0 died of it", "dead: rank 1: SIGKILL", Mark.RIGHT),
        ("exit_zero", "died: rank 0, exception", "dead: rank 1 left at step 39", Mark.WRONG),
        ("healthy", "finished after 90 steps", "finished: 20 % of a step", Mark.RIGHT),
        ("healthy", "died: rank 0, exception", "dead: rank 0: exception", Mark.WRONG),
    ],
)
def test_the_first_two_lines_of_a_report_are_judged_together(
    kind: str, first: str, verdict: str, mark: Mark
) -> None:
    judged = judge(case(kind), f"run case: {first}\nverdict   {verdict}", is_live=False)
    assert judged.mark is mark, judged


MISSING = "stalled: all_reduce does not end: 1 wait, rank 1 missing"


def test_live_lines_are_right_if_the_verdict_comes_in_time_and_stays() -> None:
    sleeps = case("sleeps")
    early = Line(-3.0, "slow: rank 0: the others wait 10 ms per step for it")
    lines = [early, Line(1.0, "healthy: all is well"), Line(11.0, MISSING), Line(17.0, MISSING)]
    judged = judge_live(sleeps, lines)
    assert (judged.mark, judged.first_right, judged.stayed) == (Mark.RIGHT, 11.0, True)

    late = judge_live(sleeps, [Line(1.0, "healthy: all is well"), Line(17.0, MISSING)])
    assert late.mark is Mark.PARTLY

    taken_back = judge_live(sleeps, [*lines, Line(18.0, "healthy: all is well")])
    assert (taken_back.mark, taken_back.stayed) == (Mark.WRONG, False)

    assert judge_live(sleeps, [early]).mark is Mark.UNSEEN


def test_an_accusation_after_the_fault_spoils_a_case_unless_it_was_there_before() -> None:
    sleeps = case("sleeps")
    accused = "slow: rank 0: the others wait 10 ms per step for it"
    lines = [Line(2.0, accused), Line(11.0, MISSING)]
    assert judge_live(sleeps, lines).mark is Mark.WRONG
    lines = [Line(-1.0, accused), *lines]
    assert judge_live(sleeps, lines).mark is Mark.RIGHT
    assert accusations(sleeps, lines) == [accused]


def test_a_restart_is_told_as_one_and_not_as_a_death() -> None:
    dead = Line(4.0, "dead: rank 1: exception after step 39")
    restarting = Line(6.0, "starting: attempt 2, no step has ended for 3 s")
    well = Line(12.0, "healthy: no memory is running out")
    assert judge_live(case("restart_repeats"), [dead, restarting, dead]).mark is Mark.RIGHT
    assert judge_live(case("restart_repeats"), [dead]).mark is Mark.SILENT
    assert judge_live(case("restart_recovers"), [dead, restarting, well]).mark is Mark.RIGHT
    still_dead = Line(9.0, dead.text)
    assert judge_live(case("restart_recovers"), [dead, still_dead, well]).mark is Mark.WRONG


def test_one_accusation_spoils_a_healthy_run_at_any_time() -> None:
    healthy = case("healthy", ALL_RANKS)
    well = Line(2.0, "healthy: no memory is running out")
    accused = Line(-3.0, "slow: rank 0: the others wait 10 ms per step for it")
    assert judge_live(healthy, [well]).mark is Mark.RIGHT
    judged = judge_live(healthy, [accused, well])
    assert (judged.mark, judged.text) == (Mark.WRONG, accused.text)


def test_a_flip_is_a_word_that_is_back_within_five_seconds() -> None:
    words = [(0.0, "healthy"), (4.0, "slow"), (8.0, "healthy"), (9.0, "stalled"), (15.0, "healthy")]
    lines = [Line(seconds, f"{word}: because") for seconds, word in words]
    assert flips(lines) == ["healthy -> slow -> healthy"]


def test_a_case_that_nobody_saw_is_not_in_the_share() -> None:
    assert share([Mark.RIGHT, Mark.WRONG, Mark.UNSEEN]) == 0.5
    assert share([]) == 0.0


def test_what_is_over_at_once_is_not_in_the_score() -> None:
    green = Line(1.5, "healthy: no memory is running out")
    assert judge_live(case("killed"), [green]).mark is Mark.UNSEEN
    assert judge_live(case("killed"), [green, Line(4.0, green.text)]).mark is Mark.WRONG
    assert judge_live(case("killed"), [Line(1.5, "dead: rank 1: SIGKILL")]).mark is Mark.RIGHT


def drawn_result(kind: str, live: str, after: str, early: list[str]) -> dict[str, Any]:
    return {
        "case": {"kind": kind}, "false_before": early,
        "live": {"mark": live, "flips": []}, "after": {"mark": after}, "later": {"mark": after},
    }  # fmt: skip


def test_results_are_published_with_the_columns_of_the_page() -> None:
    spec = importlib.util.spec_from_file_location("drawn_run", ROOT / "tests" / "long" / "run.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    results = [
        drawn_result("nan", "right", "right", []), drawn_result("nan", "unseen", "wrong", []),
        drawn_result("sleep", "wrong", "right", ["rank 1 named"]),
    ]  # fmt: skip
    where = {"date": "2026-11-26", "commit": "5da43f5a", "machine": "x86_64", "cpus": 2}
    summary = {**where, "python": "3.11.2", "shares": program.shares_of(results), "results": results}
    entries = program.page_entries(summary | {"healthy": False})
    stored = read_entries("reliability")
    for name, entry in (entries | program.page_entries(summary | {"healthy": True})).items():
        assert entry_faults(entry) == []
        assert entry["head"] == stored[name]["head"]
    assert entries["faults"]["rows"] == [["nan", "2", "1/1", "1/2"], ["sleep", "1", "0/1", "1/1"]]
    assert entries["drawn"]["rows"][0] == ["while the fault lasts", "1 of 2 (50.0%)", "97 %"]
    assert entries["drawn"]["rows"][-1][1] == "1 of 3"
