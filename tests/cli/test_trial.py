"""`zeromon try`: what it lists, what it asks, how it ends a trial, and what it prints."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from builders import changed, rank, run

from zeromon.base.errors import TrialRefused
from zeromon.cli import detach, main, trial as verb
from zeromon.ring.trial_words import Change
from zeromon.snapshot import Finding, RunSnapshot, Severity
from zeromon.snapshot.finding import ConfigFormat, Remedy, Trial, TrialState

REMEDY = Remedy(cause="c", dialect=ConfigFormat.PYTHON, diff="+ gc.disable()", price="p")
MADE = Trial(
    number=1, rule="garbage_collection", code="ZM606", change=Change.SHARED_COLLECTIONS,
    state=TrialState.ON, first=41, size=6, blocks=24, dialect=REMEDY.dialect, diff=REMEDY.diff,
)  # fmt: skip
GOOD = replace(MADE, state=TrialState.DONE, steps=120, gain_seconds=0.0243, error_seconds=0.0031)


class Source:
    """A collector whose trial goes from state to state at each look."""

    run = "train-1"
    pids = (100, 101)

    def __init__(self, *states: Trial) -> None:
        self.states, self.asked = list(states), list[Any]()

    def open(self) -> Source:
        return self

    def latest(self) -> RunSnapshot:
        ranks = [changed(rank(n), world_size=2, alive=True, ended="") for n in range(2)]
        found = [("garbage_collection", "ZM606"), ("data_wait", "ZM601")]
        findings = tuple(
            Finding(rule=rule, severity=Severity.INFO, text="t", code=code, remedy=REMEDY)
            for rule, code in found
        )
        trials: tuple[Trial, ...] = ()
        if self.asked and self.states:
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            if isinstance(state, Trial):
                trials = (state,)
            else:
                raise state
        return run(*ranks, findings=findings, trials=trials)

    def try_change(self, rule: str, rounds: int) -> int:
        self.asked.append((rule, rounds))
        return 1

    def renew_trial(self, number: int, *, go_on: bool) -> None:
        self.asked.append((number, go_on))


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    made = Source(MADE, GOOD)
    monkeypatch.setattr(verb, "find_live_runs", lambda _: [made])
    monkeypatch.setattr(verb, "_LOOK_SECONDS", 0.0)
    return made


def test_without_a_finding_it_lists_them(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "ZM606 garbage_collection: can be tried"
    assert told[1].startswith("ZM601 data_wait: the workers of an iterator")
    assert source.asked == []


def test_it_is_confirmed_and_known(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "ZM606"]) == 2
    assert "confirm with --yes" in capsys.readouterr().err
    assert main(["try", "ZM999", "--yes"]) == 2
    assert main(["try", "ZM601", "--yes"]) == 2
    assert "cannot be tried: the workers" in capsys.readouterr().err
    assert source.asked == []


def test_the_result_and_the_diff_to_keep(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "zm606", "--yes", "--rounds", "4"]) == 0
    told = capsys.readouterr().out
    assert "-24.3 ms ± 3.1 ms per step over 120 steps" in told and "+ gc.disable()" in told
    assert source.asked == [("garbage_collection", 4), (1, True)]
    source.states = [replace(GOOD, error_seconds=0.1, note="the noise ...")]
    assert main(["try", "ZM606", "--yes"]) == 1
    told = capsys.readouterr().out
    assert "n/a: the noise" in told and "gc.disable" not in told
    source.states = [GOOD]
    assert main(["try", "ZM606", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trial"]["gain_seconds"] == 0.0243


def test_ctrl_c_waits_until_the_ranks_are_as_before(
    source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    over = replace(MADE, state=TrialState.WITHDRAWN, note="it was withdrawn")
    source.states = [MADE, KeyboardInterrupt(), MADE, over]  # type: ignore[list-item]
    assert main(["try", "ZM606", "--yes"]) == 130
    assert source.asked[-1] == (1, False) and source.states == [over]
    assert "the change is undone" in capsys.readouterr().err


def test_a_trial_that_the_collector_does_not_know_is_an_error(source: Source) -> None:
    source.states = []
    assert main(["try", "ZM606", "--yes"]) == 2


def test_detach_ends_a_trial_first(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents leave at different steps; a change must end at one."""
    monkeypatch.setattr(detach, "find_live_runs", lambda _: [source])
    detach._end_open_trials({7})
    assert source.asked == []
    source.asked.append("something")
    source.states = [MADE, MADE, replace(MADE, state=TrialState.WITHDRAWN)]
    detach._end_open_trials({101})
    assert source.asked[1:] == [(1, False)] and len(source.states) == 1
    source.states, verb_limit = [MADE], "_UNDO_SECONDS"
    monkeypatch.setattr(verb, verb_limit, 0.0)
    with pytest.raises(TrialRefused, match="has not ended"):
        detach._end_open_trials({101})
