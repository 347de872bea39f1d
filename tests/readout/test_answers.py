"""The four answers that page, terminal and report begin with."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from builders import rank, run, summary
from hypothesis import given, strategies as st

from zeromon.readout.answers import (
    Kind,
    findings_by_urgency,
    findings_to_act_on,
    ledger_summary,
    life_of_run,
    life_text,
    memory_answer,
    step_bars,
)
from zeromon.readout.breakdown import rank_parts
from zeromon.readout.ledger import JobLedger, job_ledger
from zeromon.readout.report import render_answers
from zeromon.readout.text import run_state
from zeromon.readout.throughput import progress_text
from zeromon.readout.verdict import Health
from zeromon.snapshot import Finding, Pool, RiskCause, Severity
from zeromon.snapshot.communication import Straggler
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.ledger import Cause, LedgerRow
from zeromon.snapshot.memory import KILLED_FOR_MEMORY, Risk
from zeromon.storage.run_store import manifest_of_run

SLOW = Finding(
    rule="straggler", code="ZM309", severity=Severity.WARNING, text="late", rank=1, came=1010.0
)
HANG = Finding(
    rule="collective_in_flight", code="ZM002", severity=Severity.CRITICAL, text="stuck", came=1020.0
)
LATE = Straggler(
    rank=1, late_seconds=0.05, share=0.5, since_step=4, phases=("other",), longer_seconds=0.05
)


def words(*findings: Finding) -> list[tuple[str, float, float]]:
    """Of a run from 1000 to 1030, whose first step ended at 1002."""
    started = rank(0)
    started = replace(started, ledger=replace(started.ledger, startup_seconds=2.0))
    return [(str(s.health), s.start_wall, s.end_wall) for s in life_of_run(run(started), findings)]


def test_the_life_of_a_run_is_that_of_its_findings() -> None:
    assert words() == [("starting", 1000, 1002), ("healthy", 1002, 1030)]
    over = replace(SLOW, gone=1015.0)
    assert words(over, HANG) == [
        ("starting", 1000, 1002), ("healthy", 1002, 1010), ("slow", 1010, 1015),
        ("healthy", 1015, 1020), ("stalled", 1020, 1030),
    ]  # fmt: skip
    # The worse of two counts; the other one is told again when that is over
    assert [word for word, *_ in words(SLOW, replace(HANG, gone=1025.0))][-3:] == [
        "slow", "stalled", "slow",
    ]  # fmt: skip
    assert words(replace(SLOW, severity=Severity.INFO)) == words()


def test_a_server_that_keeps_no_findings_has_no_life_to_show() -> None:
    assert life_of_run(run(rank(0), origin="http://p:9090"), [SLOW]) == ()


@given(
    st.lists(
        st.tuples(st.floats(990, 1040), st.floats(0, 50) | st.none(), st.sampled_from([SLOW, HANG])),
        max_size=12,
    )
)
def test_the_life_has_no_gap_and_no_two_alike(spans: list[tuple[float, float | None, Finding]]) -> None:
    findings = [
        replace(f, came=came, rank=n, gone=None if length is None else came + length)
        for n, (came, length, f) in enumerate(spans)
    ]
    life = life_of_run(run(rank(0)), findings)
    assert (life[0].start_wall, life[-1].end_wall) == (1000, 1030)
    for one, next_one in itertools.pairwise(life):
        assert one.end_wall == next_one.start_wall and one.health is not next_one.health
    for period in life:
        middle = (period.start_wall + period.end_wall) / 2
        standing = {f.rule for f in findings if f.came < middle and (f.gone is None or f.gone > middle)}
        assert (period.health is Health.STALLED) == ("collective_in_flight" in standing)
    assert life_text(life).count(" from ") == len(life)


def test_the_bars_are_those_of_the_median_and_of_the_late_rank() -> None:
    ranks = [rank(n, wait_seconds=0.002 * n) for n in (0, 1, 2)]
    usual, late = step_bars(run(*ranks, stragglers=(LATE,)))
    assert (usual.placement, late.placement, late.rank.rank) == ("median", "late", 1)
    for bar in (usual, late):
        assert bar.seconds == pytest.approx(sum(rank_parts(bar.rank).values()), rel=0.01)
        exposed = rank_parts(bar.rank)["exposed"]
        named = [s for s in bar.segments if "ranks" in s.name or "rank 1" in s.name]
        shared = [s for s in bar.segments if s.kind is Kind.COMMUNICATION]
        assert sum(s.seconds for s in (*named, *shared)) == pytest.approx(exposed)
    assert [s.late for s in late.segments if s.kind is Kind.OWN] == [True]
    assert not any(s.late for s in usual.segments)


def test_waiting_is_named_by_whom_the_rank_waits_for() -> None:
    ranks = [rank(0, wait_seconds=0.005), rank(1)]
    blamed, nobody = run(*ranks, stragglers=(LATE,)), run(*ranks)
    assert "waits for rank 1 5.0 %" in step_bars(blamed)[0].text
    assert "waits for other ranks 5.0 %" in "; ".join(bar.text for bar in step_bars(nobody))
    assert [bar.placement for bar in step_bars(run(rank(0)))] == [""]
    assert step_bars(run()) == ()


def test_communication_that_nobody_timed_is_not_shown_as_compute() -> None:
    idle = tuple(summary(n, idle=True) for n in range(1, 21))
    (bar,) = step_bars(run(rank(0, recent=idle)))
    assert bar.segments[0].name == "compute and communication"
    assert "; communication n/a: " in bar.text
    assert "n/a" not in step_bars(run(rank(0)))[0].text


def test_a_victim_and_a_stopped_rank_do_not_die_in_the_life_of_their_run() -> None:
    died = replace(HANG, rule="rank_died", code="ZM001")
    assert words(died)[-1][0] == "dying"
    for severity in (Severity.WARNING, Severity.INFO):
        assert words(replace(died, severity=severity)) == words()


def test_a_finding_that_ends_before_it_came_counts_nowhere() -> None:
    """By a clock that was set back."""
    assert words(replace(HANG, gone=1005.0)) == words()


def test_the_life_goes_on_to_the_end_of_the_record_at_a_moment_of_the_past() -> None:
    past = replace(run(rank(0)), taken_wall=1012.0)
    life = life_of_run(past, [SLOW, HANG], 1030.0)
    assert life[-1].end_wall == 1030.0 and life[-1].health is Health.STALLED


def test_many_findings_at_once_take_no_time_that_grows_with_their_square() -> None:
    """Of thousands of ranks: each comes and goes once, whatever else stands."""
    many = [replace(SLOW, rank=n, came=1005 + n / 1000, gone=1020 + n / 1000) for n in range(5000)]
    assert [str(period.health) for period in life_of_run(run(rank(0)), many)] == [
        "healthy", "slow", "healthy",
    ]  # fmt: skip
    assert life_of_run(run(), many)[0].health is Health.STARTING


def test_what_comes_with_a_change_comes_before_what_does_not() -> None:
    fix = Remedy(cause="c", dialect="Python", diff="- a\n+ b")
    other = Finding(rule="data_wait", code="ZM601", severity=Severity.INFO, text="t", remedy=fix)
    ended = Finding(rule="rank_died", code="ZM001", severity=Severity.WARNING, text="SIGTERM", rank=0)
    shown = findings_to_act_on(run(rank(0), findings=(SLOW, ended, other)))
    assert [f.code for f in shown] == ["ZM601"]
    shown = findings_to_act_on(run(rank(0), findings=(replace(SLOW, action="Look."), ended, other)))
    assert [f.code for f in shown] == ["ZM309", "ZM601"]
    assert findings_to_act_on(run(rank(0))) == ()
    stopped = run(rank(0, alive=False, ended="finished"), ended=True, findings=(ended,))
    assert findings_to_act_on(stopped) == ()


def test_the_ends_of_ranks_that_were_stopped_come_last() -> None:
    """Of a run that died they are its cause, and come first."""
    ended = Finding(rule="rank_died", code="ZM001", severity=Severity.WARNING, text="SIGTERM", rank=0)
    stopped = rank(0, alive=False, failed=True, ended="SIGTERM")
    of_stopped = findings_by_urgency(run(stopped, ended=True, findings=(ended, SLOW)))
    assert [f.code for f in of_stopped] == ["ZM309", "ZM001"]
    died = rank(0, alive=False, failed=True, ended="SIGKILL")
    of_dead = findings_by_urgency(run(died, ended=True, findings=(ended, SLOW)))
    assert [f.code for f in of_dead] == ["ZM001", "ZM309"]


def test_a_run_whose_ranks_are_a_step_apart_has_one_last_step() -> None:
    """In the list of runs, beside the verdict, and in the progress."""
    facts = {"alive": False, "failed": True, "ended": "SIGTERM", "goal": {"steps": 900, "by": "Trainer"}}
    stopped = run(rank(0, last_step=293, **facts), rank(1, last_step=292, **facts), ended=True)
    assert manifest_of_run(stopped).steps == 293
    assert run_state(stopped) == "stopped by SIGTERM after step 293"
    assert progress_text(stopped) == "step 293 of 900"


def test_memory_is_answered_with_yes_or_no() -> None:
    def answer(**facts: object) -> str:
        risk = Risk(
            pool=Pool.DEVICE,
            ratio=0.1,
            steps_left=None,
            used_bytes=60 << 30,
            capacity_bytes=80 << 30,
            cause=RiskCause.NONE,
        )
        return memory_answer(run(rank(0, risks=(replace(risk, **facts),))))  # type: ignore[arg-type]

    assert answer() == "no, 20.0 GiB of device memory left"
    near = "not yet, but only 5.0 GiB of 80.0 GiB of device memory left"
    assert answer(used_bytes=75 << 30) == near
    assert answer(ratio=0.95, used_bytes=79 << 30, cause=RiskCause.STATIC).startswith("at risk: ")
    for unknown in ({"used_bytes": -1}, {"capacity_bytes": -1}):
        assert answer(**unknown).startswith("n/a: ")
    assert answer(steps_left=100.0, growth_bytes_per_step=1.0).startswith("yes, at about step 120")
    assert memory_answer(run(rank(0, risks=()))).startswith("n/a: ")
    killed = rank(0, alive=False, failed=True, ended=KILLED_FOR_MEMORY)
    assert memory_answer(run(killed, ended=True)) == "yes: rank 0 ran out of host memory"


def test_the_summary_of_the_ledger_sums_to_all_time() -> None:
    seconds = {cause: float(n + 1) for n, cause in enumerate(Cause)}
    rows = tuple(LedgerRow(cause=cause, seconds=spent) for cause, spent in seconds.items())
    total = sum(seconds.values())
    text = ledger_summary(JobLedger(rows=rows, rank_seconds=total, attempts=1, notes=()))
    assert sum(float(part.split()[-2]) for part in text.split(", ")) == pytest.approx(100, abs=0.5)
    waits = sum(seconds[c] for c in (Cause.WAITING, Cause.DATA, Cause.HANG, Cause.STALL))
    assert f"waiting {100 * waits / total:.1f} %" in text
    assert ledger_summary(job_ledger([run()])) == ""


def test_the_report_of_a_healthy_run_has_25_lines_and_the_cause_is_in_the_second() -> None:
    lines = render_answers(run(rank(0), rank(1), ended=True)).splitlines()
    assert len(lines) <= 25
    assert lines[1].startswith("  ■ finished: ")
    order = [lines.index(next(line for line in lines if line.startswith(question))) for question in (
        "What does a step wait for?", "What do I change?", "Will it run out of memory?", "All figures:",
    )]  # fmt: skip
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("origin", "step", "reason"),
    [
        ("http://p:9090", 5, "no step between two of the last scrapes"),
        ("http://p:9090", 0, "no step has ended"),
        ("", 0, "no step has ended"),
    ],
)
def test_an_unknown_step_time_names_the_scrapes_that_are_missing(
    origin: str, step: int, reason: str
) -> None:
    untimed = rank(0, last_step=step, mean_seconds=None, median_seconds=None)
    text = render_answers(run(untimed, origin=origin))
    assert f"What does a step wait for? n/a: {reason}\n" in text


def test_the_change_of_the_verdict_is_shown_with_its_diff() -> None:
    fix = Remedy(cause="nothing overlaps", dialect="Python", diff="- a\n+ b", gain_high_seconds=0.1)
    found = Finding(
        rule="exposed_communication", code="ZM301", severity=Severity.WARNING, text="waits", rank=0,
        remedy=fix, share=0.4,
    )  # fmt: skip
    text = render_answers(run(rank(0), findings=(found,)), action_of=lambda f: f"advice on {f.code}")
    assert "\n  ZM301 Nothing overlaps; Python:\n" in text and "+ b" in text and "advice on" not in text
    alone = render_answers(
        run(rank(0), findings=(replace(found, remedy=None),)), action_of=lambda f: f.code.lower()
    )
    assert "  ZM301 zm301" in alone
