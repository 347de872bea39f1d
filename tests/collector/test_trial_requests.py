"""The collector's side of a trial: what it refuses, how it judges, and when it ends one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import changed, rank, run, summary as step

from zeromon.base.errors import TrialRefused
from zeromon.collector.requests import Trials, judge_trial, with_trial_results
from zeromon.readout.remedy import (
    CHANGES,
    effect_text,
    progress_text,
    remedy_text,
    result_text,
    trial_obstacle,
    tried_text,
)
from zeromon.ring.trial_words import REQUEST, Change
from zeromon.snapshot import Finding, RunSnapshot, Severity
from zeromon.snapshot.finding import ConfigFormat, RankTrial, Remedy, Trial, TrialState

REMEDY = Remedy(
    cause="c", dialect=ConfigFormat.FSDP2, diff="+ a", gain_low_seconds=0.01, gain_high_seconds=0.02
)
ADVISED = Finding(
    rule="fsdp_prefetch_off", severity=Severity.INFO, text="t", code="ZM305", remedy=REMEDY
)
RINGS = ("rank0.ring", "rank1.ring")


def live(**changes: Any) -> RunSnapshot:
    ranks = tuple(
        changed(
            rank(n),
            alive=True,
            ended="",
            world_size=2,
            last_step=30,
            watched_steps=30,
            median_seconds=0.1,
        )
        for n in range(2)
    )
    return replace(run(*ranks), **{"findings": (ADVISED,)} | changes)


def answer(state: TrialState, at: int = 0, **more: Any) -> RankTrial:
    fields = {"number": 1, "state": state, "step": at, "why": "", "undo_seconds": 0.0}
    return RankTrial(**fields | more)


def test_a_request_is_a_plan_of_one_listed_change(tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    made = trials.request(live(), RINGS, "ZM305", 6, 0)
    content = json.loads((tmp_path / REQUEST).read_text())
    assert content == {
        "number": 1, "change": "prefetch", "first": made.first, "size": 6, "blocks": 24,
        "rings": list(RINGS),
    }  # fmt: skip
    assert made.first > 30 + 25
    with pytest.raises(TrialRefused, match="under way"):
        trials.request(live(), RINGS, "ZM305", 6, 0)
    trials.renew_lease(1, go_on=False)
    assert not (tmp_path / REQUEST).exists()
    with pytest.raises(TrialRefused, match="no trial 9"):
        trials.renew_lease(9, go_on=True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ended": True}, "has ended"),
        ({"findings": ()}, "no finding ZM305"),
        ({"nodes": (object(),)}, "several nodes"),
        ({"hangs": (object(),)}, "hangs"),
        ({"findings": (replace(ADVISED, remedy=None),)}, "no change to make"),
        (
            {"findings": (replace(ADVISED, remedy=replace(REMEDY, dialect=ConfigFormat.FSDP1)),)},
            "only FSDP2",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(TrialRefused, match=why):
        Trials(tmp_path).request(live(**changes), RINGS, "ZM305", 6, 0)
    assert not list(tmp_path.iterdir())


def test_what_could_change_results_is_refused_with_its_reason() -> None:
    accumulates = replace(ADVISED, rule="accumulation_communicates")
    assert "another order" in trial_obstacle(live(), accumulates)
    assert "new start" in trial_obstacle(live(), replace(ADVISED, rule="stage_too_high"))
    assert set(CHANGES.values()) == set(Change)


TRIAL = Trial(
    number=1, rule="fsdp_prefetch_off", code="ZM305", change=Change.PREFETCH, state=TrialState.ON,
    first=41, size=6, blocks=16, dialect="Python", diff="+ a", gain_low_seconds=0.01,
    gain_high_seconds=0.02,
)  # fmt: skip


def stepping(gain_ns: int, noise_ns: int = 0, until: int = 137, **trial: Any) -> RunSnapshot:
    """Two ranks whose steps are shorter by *gain_ns* in the blocks with the change."""
    steps = []
    for n in range(1, until):
        block = (n - 41) // 6
        on = n >= 41 and block % 4 in (1, 2)
        length = 100_000_000 - gain_ns * on + noise_ns * (1 if n % 5 % 2 else -1)
        if on and (n - 41) % 6 == 0:
            length += 50_000_000  # the step after a switch
        steps.append(replace(step(n), step=n, start_ns=n * 10**9, end_ns=n * 10**9 + length))
    shown = live()
    state = answer(TrialState.DONE, 137, **trial)
    ranks = tuple(changed(r, recent=tuple(steps), trial=state) for r in shown.ranks)
    return replace(shown, ranks=ranks)


def test_the_gain_is_judged_by_its_noise() -> None:
    good = judge_trial(TRIAL, stepping(24_000_000, 1_000_000).ranks, 137)
    assert good.gain_seconds == pytest.approx(0.024, abs=1e-3) and good.is_significant
    assert good.steps == 16 * 5
    assert "-24." in result_text(good) and "(10.0 ms to 20.0 ms less were predicted)" in result_text(
        good
    )
    none = judge_trial(TRIAL, stepping(0, 5_000_000).ranks, 137)
    assert not none.is_significant and none.note == "the noise of the steps allows no verdict"
    assert result_text(none).startswith("n/a: the noise")
    short = judge_trial(TRIAL, stepping(24_000_000).ranks, 41 + 8 * 6)
    assert not short.is_significant and "fewer than 3 rounds" in short.note
    early = judge_trial(TRIAL, stepping(24_000_000).ranks, 45)
    assert early.gain_seconds is None and result_text(early).startswith("n/a: no whole round")


def test_collections_between_the_steps_count_as_cost() -> None:
    trial = replace(TRIAL, change=Change.SHARED_COLLECTIONS)
    free = judge_trial(trial, stepping(24_000_000).ranks, 137)
    paid = judge_trial(trial, stepping(24_000_000, undo_seconds=0.48).ranks, 137)
    assert free.gain_seconds is not None and paid.gain_seconds is not None
    assert free.gain_seconds - paid.gain_seconds == pytest.approx(0.01)  # over 48 steps


def test_a_trial_is_followed_to_its_end(tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    first = trials.request(live(), RINGS, "ZM305", 4, 0).first
    assert trials.follow(live().ranks, 10**9)[-1].state is TrialState.WAITING
    on = tuple(changed(r, trial=answer(TrialState.ON, first + 6)) for r in live().ranks)
    assert trials.follow(on, 2 * 10**9)[-1].state is TrialState.ON
    one = (changed(on[0], trial=answer(TrialState.DONE, first)), on[1])
    assert trials.follow(one, 3 * 10**9)[-1].is_open
    over = answer(TrialState.REFUSED, first, why="it is so already")
    done = trials.follow(tuple(changed(r, trial=over) for r in on), 4 * 10**9)[-1]
    assert (done.state, done.note) == (TrialState.REFUSED, "it is so already")
    assert not (tmp_path / REQUEST).exists()
    assert trials.request(live(), RINGS, "ZM305", 4, 0).number == 2


def test_a_job_that_stalls_slows_down_or_dies_gets_its_state_back(tmp_path: Path) -> None:
    for case in ("stalls", "slower", "dies", "silent"):
        trials = Trials(tmp_path)
        made = trials.request(live(), RINGS, "ZM305", 4, 0)
        started = replace(
            live(), ranks=tuple(changed(r, trial=answer(TrialState.ON)) for r in live().ranks)
        )
        ranks, now = started.ranks, 10**9
        if case == "stalls":
            ranks = tuple(changed(r, recent=(step(30),)) for r in ranks)
            now = ranks[0].steps.recent[0].end_ns + 60 * 10**9
        elif case == "slower":
            recent = tuple(
                replace(step(n), step=n, start_ns=0, end_ns=10**8 * (5 if n >= made.first + 6 else 1))
                for n in range(made.first, made.first + 11)
            )
            ranks = tuple(changed(r, recent=recent, last_step=made.first + 10) for r in ranks)
        elif case == "dies":
            ranks = (changed(ranks[0], alive=False), ranks[1])
        else:
            ranks, now = live().ranks, 61 * 10**9
        followed = trials.follow(ranks, now)[-1]
        assert followed.note, case
        assert not (tmp_path / REQUEST).exists(), case


def test_a_finding_says_what_was_tried() -> None:
    good = judge_trial(TRIAL, stepping(24_000_000, 1_000_000).ranks, 137)
    (known,) = with_trial_results((ADVISED,), (good,))
    assert known.remedy is not None
    assert tried_text(known.remedy).startswith("-24.")
    assert effect_text(known.remedy).startswith("tried -24.")
    assert remedy_text(known.remedy).outlook.startswith("tried: -24.")
    assert "predicted: 10.0 ms to 20.0 ms" in remedy_text(known.remedy).outlook
    no_verdict = replace(good, error_seconds=1.0)
    assert with_trial_results((ADVISED,), (no_verdict,)) == (ADVISED,)


def test_progress() -> None:
    assert progress_text(TRIAL, 12) == "trial 1 waits for step 41, now 12"
    assert progress_text(TRIAL, 60) == "trial 1: step 60 of 41 to 136, change on"
