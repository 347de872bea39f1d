"""Stalls: when a rank is stalled, what explains it, and what the rule makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import rank, run, summary

from zeromon.cli.doctor import as_text
from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.stalls import explanation, stalls
from zeromon.readout.text import verdict
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, Severity
from zeromon.tui.line import plain
from zeromon.tui.status_text import head, risk

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


def stuck(number: int = 0, *, stack: tuple[str, ...] = SLEEPS, step: float = 1.0) -> RankSnapshot:
    """A rank whose last step, number 10, ended at 10 s."""
    steps = tuple(summary(n, start_ns=(n - 1) * SECOND, end_ns=n * SECOND) for n in range(1, 11))
    return rank(number, recent=steps, steps=10, step=10, step_seconds=step, stack=stack)


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


def test_a_stall_names_since_when_and_where_each_rank_is() -> None:
    finding = found(stalled_for(60, stuck(0), stuck(1)))
    assert finding is not None and finding.severity is Severity.CRITICAL
    assert finding.text.startswith("no step has ended for 60 s")
    assert finding.text.count("train.py:12 in oversleep") == 2


def test_a_rank_whose_agent_sees_progress_is_not_stalled() -> None:
    """Its stack is empty then: an evaluation with collectives goes on, for one."""
    assert stalls(stalled_for(600, stuck(stack=()))) == ()


@pytest.mark.parametrize("text", EXPECTED)
def test_an_expected_pause_is_information(text: str) -> None:
    paused = stuck(stack=(*SLEEPS, EXPECTED[text]))
    assert explanation(paused) == text
    finding = found(stalled_for(300, paused))
    assert finding is not None and finding.severity is Severity.INFO and text in finding.text


def test_an_evaluation_is_information_and_a_loader_that_hangs_in_one_is_not() -> None:
    evaluates = replace(stuck(), evaluating=True)
    loads = replace(stuck(stack=LOADS), evaluating=True)
    finding = found(stalled_for(300, evaluates))
    assert finding is not None and finding.severity is Severity.INFO
    finding = found(stalled_for(300, loads))
    assert finding is not None and finding.severity is Severity.CRITICAL
    assert "waits for a batch of its DataLoader" in finding.text


def test_one_rank_without_an_explanation_makes_the_stall_critical() -> None:
    saves = stuck(0, stack=(*SLEEPS, EXPECTED["saves or loads a checkpoint"]))
    finding = found(stalled_for(300, saves, stuck(1)))
    assert finding is not None
    assert (finding.severity, finding.rank) == (Severity.CRITICAL, 1)


def test_the_verdict_of_a_stalled_run_does_not_say_that_it_runs() -> None:
    late = stalled_for(60, stuck())
    assert verdict(late).startswith("running")
    assert verdict(replace(late, findings=advise(late))) == "stalled after step 10"


def test_the_first_lines_of_the_terminal_are_red_for_a_stalled_run() -> None:
    late = stalled_for(60, stuck())
    late = replace(late, findings=advise(late))
    assert (" ✖ ", "bad") in head(late)
    assert plain(risk(late)).startswith(" ✖ rank 0: no step has ended for 60 s")


def test_the_doctor_names_a_stalled_run() -> None:
    late = stalled_for(60, stuck())
    late = replace(late, findings=advise(late))
    text = as_text(late, (), {})
    assert "!! rank 0: no step has ended for 60 s" in text and "no collective hangs" not in text


def test_an_ended_run_is_not_stalled() -> None:
    assert stalls(replace(stalled_for(600, stuck()), ended=True)) == ()
