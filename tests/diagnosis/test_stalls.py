"""Stalls: when a rank is stalled, what explains it, and what the rule makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import changed, rank, run, summary

from zeromon.cli.doctor import run_as_text
from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.stalls import find_stalls
from zeromon.export.prometheus.metrics import METRICS
from zeromon.fold.summarize import STARTS, expected_pause_reason
from zeromon.readout.text import pause_seconds, run_state
from zeromon.readout.verdict import Health, judge_run
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.communication import GroupProgress, InFlight
from zeromon.snapshot.levels import PAUSE_SECONDS
from zeromon.snapshot.rank import Halt
from zeromon.tui.columns import DisplayOptions
from zeromon.tui.line import plain_text
from zeromon.tui.status_text import head_line, run_figures, verdict_line

SECOND = 1_000_000_000
SLEEPS = ("/home/me/train.py:40 in <module>", "/home/me/train.py:12 in oversleep")
LOADS = (
    "/home/me/train.py:40 in <module>",
    "/usr/lib/python3.11/site-packages/torch/utils/data/dataloader.py:1275 in _try_get_data",
)
EXPECTED = {
    "saves or loads a checkpoint": "/site-packages/torch/serialization.py:943 in save",
    "compiles": "/site-packages/torch/_inductor/compile_fx.py:700 in compile_fx",
    "is stopped in a debugger": "/lib/python3.11/pdb.py:1700 in interaction",
}


def stuck(
    number: int = 0, *, stack: tuple[str, ...] = SLEEPS, step: float = 1.0, evaluating: bool = False
) -> RankSnapshot:
    """A rank whose last step, number 10, ended at 10 s."""
    steps = tuple(summary(n, start_ns=(n - 1) * SECOND, end_ns=n * SECOND) for n in range(1, 11))
    return rank(
        number,
        recent=steps,
        watched_steps=10,
        last_step=10,
        median_seconds=step,
        stack=stack,
        pause=expected_pause_reason(stack, evaluating=evaluating),
    )


def stalled_for(seconds: float, *ranks: RankSnapshot) -> RunSnapshot:
    """The run so long after the last step of its ranks."""
    return run(*ranks, taken_ns=round((10 + seconds) * SECOND))


def found(run: RunSnapshot) -> Finding | None:
    return next((f for f in advise(run) if f.rule == "stalled"), None)


def test_a_rank_is_stalled_after_fifteen_seconds_and_five_usual_steps() -> None:
    assert found(stalled_for(19, stuck())) is None
    assert found(stalled_for(21, stuck())) is not None
    assert found(stalled_for(40, stuck(step=10.0))) is None
    assert found(stalled_for(66, stuck(step=10.0))) is not None


def test_a_rank_that_shuts_down_after_the_others_have_finished_is_not_stalled() -> None:
    """Nor does the verdict change while a run ends well; one that stops earlier than the others is."""
    others = stuck(1), stuck(2)
    for gone in (
        changed(others[0], alive=False, ended="finished"), changed(others[0], leaving=True),
    ):  # fmt: skip
        ends = stalled_for(40, stuck(), gone, changed(others[1], stack=()))
        assert found(ends) is None
        judged = judge_run(ends)
        assert (judged.health, judged.severity) == (Health.HEALTHY, None)
        assert run_state(ends) == "ending after step 10" and "processes end" in judged.cause
        assert found(stalled_for(PAUSE_SECONDS + 1, stuck(), gone)) is not None
        assert found(stalled_for(40, changed(stuck(), last_step=8), gone)) is not None


def test_a_stall_names_since_when_and_where_each_rank_is() -> None:
    finding = found(stalled_for(60, stuck(0), stuck(1)))
    assert finding is not None and finding.severity is Severity.CRITICAL
    assert finding.text.startswith("no step has ended for 60 s")
    assert finding.text.endswith(": ranks 0, 1 are in own code, at train.py:12 in oversleep")
    elsewhere = stuck(1, stack=(*SLEEPS[:-1], "/data/other.py:3 in load"))
    finding = found(stalled_for(60, stuck(0), elsewhere))
    assert finding is not None and "at other.py:3 in load" in finding.text
    assert "rank 0 is in own code, at train.py:12 in oversleep; rank 1 is" in finding.text


def test_a_rank_whose_agent_sees_progress_is_not_stalled() -> None:
    """Its stack is empty then: an evaluation with collectives goes on, for one."""
    assert find_stalls(stalled_for(600, stuck(stack=()))) == ()


@pytest.mark.parametrize("text", EXPECTED)
def test_an_expected_pause_is_information(text: str) -> None:
    paused = stuck(stack=(*SLEEPS, EXPECTED[text]))
    assert paused.status.pause == text
    finding = found(stalled_for(300, paused))
    assert finding is not None and finding.severity is Severity.INFO and text in finding.text


def test_an_evaluation_is_information_and_a_loader_that_hangs_in_one_is_not() -> None:
    evaluates = stuck(evaluating=True)
    loads = stuck(stack=LOADS, evaluating=True)
    finding = found(stalled_for(300, evaluates))
    assert finding is not None and finding.severity is Severity.INFO
    finding = found(stalled_for(300, loads))
    assert finding is not None and finding.severity is Severity.CRITICAL
    assert "waiting for a batch of the DataLoader" in finding.text


def test_one_rank_without_an_explanation_makes_the_stall_critical() -> None:
    saves = stuck(0, stack=(*SLEEPS, EXPECTED["saves or loads a checkpoint"]))
    finding = found(stalled_for(300, saves, stuck(1)))
    assert finding is not None
    assert (finding.severity, finding.rank) == (Severity.CRITICAL, 1)


def test_the_verdict_of_a_stalled_run_does_not_say_that_it_runs() -> None:
    late = stalled_for(60, stuck())
    assert run_state(late).startswith("running")
    assert run_state(replace(late, findings=advise(late))) == "stalled after step 10"


def test_the_first_lines_of_the_terminal_are_red_for_a_stalled_run() -> None:
    late = stalled_for(60, stuck())
    late = replace(late, findings=advise(late))
    assert (" ✖ stalled ", "bad") in head_line(late)
    assert plain_text(verdict_line(late)).startswith(" ✖ rank 0: no step has ended for 60 s")


def test_the_doctor_names_a_stalled_run() -> None:
    late = stalled_for(60, stuck())
    late = replace(late, findings=advise(late))
    text = run_as_text(late, (), {})
    assert "!! rank 0: no step has ended for 60 s" in text and "no collective hangs" not in text


def test_an_ended_run_is_not_stalled() -> None:
    assert find_stalls(replace(stalled_for(600, stuck()), ended=True)) == ()


def test_no_pause_is_expected_for_ever() -> None:
    saves = stuck(stack=(*SLEEPS, EXPECTED["saves or loads a checkpoint"]))
    finding = found(stalled_for(1801, saves))
    assert finding is not None and finding.severity is Severity.WARNING


def starting(**fields: Any) -> RankSnapshot:
    """A rank without a step, which started at 0 s."""
    return rank(0, pause=STARTS, recent=(), watched_steps=0, median_seconds=None, started_ns=0, **fields)


@pytest.mark.parametrize(
    ("seconds", "severity"), [(119, None), (121, Severity.WARNING), (1801, Severity.CRITICAL)]
)
def test_a_start_that_takes_long_is_a_warning_first(seconds: float, severity: Severity | None) -> None:
    finding = found(run(starting(stack=SLEEPS), taken_ns=round(seconds * SECOND)))
    assert (finding.severity if finding else None) is severity
    if finding is not None:
        assert finding.text.startswith(f"no step has ended since the start, {seconds:.0f} s ago")


def test_a_suspended_process_is_stalled_and_named() -> None:
    """Its agent is suspended with it, so there is no stack."""
    suspended = changed(stuck(stack=()), halted=Halt.SUSPENDED)
    finding = found(stalled_for(60, suspended))
    assert finding is not None and finding.severity is Severity.CRITICAL
    assert "rank 0 is suspended by a signal" in finding.text


def test_a_process_in_a_long_call_is_a_warning_first() -> None:
    silent = changed(stuck(stack=()), halted=Halt.UNRESPONSIVE)
    finding = found(stalled_for(60, silent))
    assert finding is not None and finding.severity is Severity.WARNING
    assert "a call holds the GIL" in finding.text
    finding = found(stalled_for(1801, silent))
    assert finding is not None and finding.severity is Severity.CRITICAL


def hung(missing: RankSnapshot) -> RunSnapshot:
    """Rank 0 waits for 60 s in an all_reduce that *missing*, rank 1, has not called."""
    flying = InFlight(
        op="all_reduce", group="world", group_id="w", sequence=5, unit="", phase="backward", nbytes=64,
        issued_ns=0,
    )  # fmt: skip
    there, before = (
        (GroupProgress(group_id="w", label="world", ranks=(0, 1), sequence=number),) for number in (5, 4)
    )
    waiting = rank(0, watched_steps=10, in_flight=(flying,), groups=there)
    return run(waiting, changed(missing, groups=before), taken_ns=60 * SECOND)


def test_a_collective_that_waits_for_a_checkpoint_is_information() -> None:
    saves = stuck(1, stack=(*SLEEPS, EXPECTED["saves or loads a checkpoint"]))
    waits = hung(saves)
    (hang,) = waits.hangs
    assert hang.pause == "rank 1 saves or loads a checkpoint"
    (finding,) = [f for f in advise(waits) if f.rule == "collective_in_flight"]
    assert finding.severity is Severity.INFO and hang.pause in finding.text
    (finding,) = [f for f in advise(hung(stuck(1))) if f.rule == "collective_in_flight"]
    assert finding.severity is Severity.CRITICAL


def test_rates_are_withdrawn_while_no_step_ends() -> None:
    late = stalled_for(60, stuck())
    moving, still = late, replace(late, findings=advise(late))
    assert pause_seconds(moving) is None and pause_seconds(still) == 60
    tokens = DisplayOptions(tokens_per_step=1000)
    assert {n: v for n, v, _ in run_figures(moving, tokens)}["steps/s"] == "1"
    assert not {"steps/s", "tokens/s"} & {name for name, _, _ in run_figures(still, tokens)}


def test_no_alert_for_a_collective_that_waits_for_a_checkpoint() -> None:
    """The alert asks for any series of the metric."""
    metric = next(spec for spec in METRICS if spec.name == "zeromon_hang")
    saves = hung(stuck(1, stack=(*SLEEPS, EXPECTED["saves or loads a checkpoint"])))
    assert not list(metric.rows(saves)(saves.ranks[0]))
    late = hung(stuck(1))
    assert list(metric.rows(late)(late.ranks[0]))


@pytest.mark.parametrize("ended", ["SIGTERM", "killed without a final record (SIGKILL or a crash)"])
def test_a_stall_holds_after_the_ranks_were_stopped(ended: str) -> None:
    """By the rings alone: their heartbeats say how long the ranks stood still."""
    last = round(41 * SECOND)
    stopped = [
        changed(stuck(n), alive=False, failed=True, ended=ended, last_event_ns=last) for n in (0, 1)
    ]
    finding = found(run(*stopped, ended=True, taken_ns=3600 * SECOND))
    assert finding is not None and finding.severity is Severity.CRITICAL
    assert finding.text.startswith("stalled at step 11 for 31 s: ranks 0, 1 were ")
    assert "train.py:12 in oversleep" in finding.text


def test_ranks_that_ended_by_themselves_were_not_stalled() -> None:
    ends = {"alive": False, "last_event_ns": 41 * SECOND}
    left = changed(stuck(), ended="finished", **ends)  # type: ignore[arg-type]
    assert found(run(left, ended=True, taken_ns=3600 * SECOND)) is None
    trained = changed(stuck(), ended="SIGTERM", failed=True, progress_ns=40 * SECOND, **ends)  # type: ignore[arg-type]
    assert found(run(trained, ended=True, taken_ns=3600 * SECOND)) is None
