"""Requests trials of a finding's change from the live ranks of a run, and judges them.

A request is one file in the run's folder (:mod:`zeromon.ring.trials`); the agents answer through the
rings. There is one trial at a time. The file's time is the lease: the command renews it, and the agents
undo the change where it is old or gone.
"""

import json
import os
import statistics
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zeromon.collector.trace_capture import first_step
from zeromon.errors import TrialRefused, os_errors_as
from zeromon.readout.remedy import CHANGES, obstacle
from zeromon.ring.files import replace_file
from zeromon.ring.trials import LEAST_SIZE, MARGIN, REQUEST, WORD, WORDS, Change, Plan
from zeromon.snapshot import Finding, RankSnapshot, RankTrial, RunSnapshot, Trial, TrialState
from zeromon.stats.noise import A_ROUND, LEAST_ROUNDS, gain_in_turns, half_width

ROUNDS = 6
MOST_ROUNDS = 12
_COLLECTIONS_SIZE = 20
"""Collections are rare: a block must hold some of them."""
_MOST_STEPS = 480
"""A snapshot has no more of the last steps."""
_START_TIMEOUT_SECONDS = 60.0
_STALLED_SECONDS, _STALLED_STEPS = 30.0, 20
"""A job whose newest step is older than both (seconds, median steps) gets its state back."""
_SLOWER = 3.0
"""So are the ranks when a step with the change takes so many times as long."""


class Trials:
    """The trials of one run. :meth:`request` and :meth:`renew` are called from other threads."""

    def __init__(self, folder: Path) -> None:
        self._file, self._words = folder / REQUEST, folder / WORDS
        self._lock = threading.Lock()
        self._requested_ns = 0
        self._all: tuple[Trial, ...] = ()

    def request(
        self, run: RunSnapshot, rings: tuple[str, ...], rule: str, rounds: int, now_ns: int
    ) -> Trial:
        """Requests a trial of the remedy of the finding *rule*; raises :class:`TrialRefused`."""
        with self._lock:
            if self._all and self._all[-1].is_open:
                raise TrialRefused(f"trial {self._all[-1].number} of this run is under way")
            finding = next((f for f in run.findings if rule in (f.rule, f.code)), None)
            if finding is None:
                raise TrialRefused(f"the run has no finding {rule}")
            why = obstacle(run, finding)
            if why:
                raise TrialRefused(f"{finding.code} cannot be tried: {why}")
            if not LEAST_ROUNDS <= rounds <= MOST_ROUNDS:
                raise TrialRefused(f"between {LEAST_ROUNDS} and {MOST_ROUNDS} rounds, not {rounds}")
            made = self._plan(run, finding, rounds)
            self._write(made, rings)
            self._all, self._requested_ns = (*self._all, made), now_ns
            return made

    def _plan(self, run: RunSnapshot, finding: Finding, rounds: int) -> Trial:
        change, remedy = CHANGES[finding.rule], finding.remedy
        assert remedy is not None  # obstacle() refused it
        rare = change is Change.SHARED_COLLECTIONS
        size = min(_COLLECTIONS_SIZE if rare else LEAST_SIZE, _MOST_STEPS // (A_ROUND * rounds))
        known = [t.number for t in self._all] + [r.trial.number for r in run.ranks if r.trial]
        return Trial(
            number=max(known, default=0) + 1,
            rule=finding.rule,
            code=finding.code,
            change=change,
            state=TrialState.WAITING,
            first=first_step(run.ranks) + MARGIN + 2,  # and all have agreed
            size=size,
            blocks=A_ROUND * rounds,
            dialect=remedy.dialect,
            diff=remedy.diff,
            gain_low_seconds=remedy.gain_low_seconds,
            gain_high_seconds=remedy.gain_high_seconds,
        )

    def _write(self, made: Trial, rings: tuple[str, ...]) -> None:
        plan = Plan(made.number, Change(made.change), made.first, made.size, made.blocks, rings)
        with os_errors_as(TrialRefused, f"write {self._file}"):
            replace_file(self._words, bytes(WORD.size * len(rings)))
            replace_file(self._file, json.dumps(plan._asdict()))

    def renew(self, number: int, *, go_on: bool) -> Trial:
        """Renews the lease of trial *number*, or ends it."""
        with self._lock:
            made = next((trial for trial in self._all if trial.number == number), None)
            if made is None:
                raise TrialRefused(f"the collector has no trial {number}")
            if made.is_open:
                self._keep(go_on=go_on)
            return made

    def _keep(self, *, go_on: bool) -> None:
        """Renews the file; or removes it, and the ranks undo the change before their next block."""
        with suppress(OSError):
            os.utime(self._file) if go_on else self._file.unlink()

    def follow(self, ranks: Sequence[RankSnapshot], now_ns: int) -> tuple[Trial, ...]:
        """Advances the newest trial; returns all."""
        with self._lock:
            if self._all and self._all[-1].is_open:
                self._all = (*self._all[:-1], self._advanced(self._all[-1], ranks, now_ns))
            return self._all

    def _advanced(self, made: Trial, ranks: Sequence[RankSnapshot], now_ns: int) -> Trial:
        answers = [r.trial for r in ranks if r.trial and r.trial.number == made.number]
        if any(not rank.alive for rank in ranks):
            self._keep(go_on=False)
            return replace(made, state=TrialState.WITHDRAWN, note="a rank ended")
        over = [answer for answer in answers if answer.state.is_over]
        if len(over) < len(ranks):
            waited = (now_ns - self._requested_ns) / 1e9
            if not answers and waited > max(_START_TIMEOUT_SECONDS, 20 * _typical(ranks)):
                self._keep(go_on=False)
                return replace(
                    made, state=TrialState.REFUSED, note=f"no rank answered in {waited:.0f} s"
                )
            return self._observed(made, answers, ranks, now_ns) if answers else made
        self._keep(go_on=False)
        note = next((answer.why for answer in over if answer.why), "")
        ended = replace(made, state=over[0].state, note=made.note or note)
        if any(answer.state is TrialState.REFUSED for answer in over):
            return replace(ended, state=TrialState.REFUSED)
        return judged(ended, ranks, min(answer.step for answer in over))

    def _observed(
        self, made: Trial, answers: Sequence[RankTrial], ranks: Sequence[RankSnapshot], now_ns: int
    ) -> Trial:
        """Ends a trial that stalls the job, or makes it much slower."""
        state = next((answer.state for answer in answers if not answer.state.is_over), made.state)
        now = replace(made, state=state)
        newest_ns = max((r.recent[-1].end_ns for r in ranks if r.recent), default=now_ns)
        silent, step = (now_ns - newest_ns) / 1e9, _typical(ranks)
        why = ""
        if silent > max(_STALLED_SECONDS, _STALLED_STEPS * step):
            why = f"no step ended for {silent:.0f} s"
        else:
            off, on = _by_state(now, ranks, max(r.step for r in ranks) + 1)
            if len(on) > 2 and off and statistics.median(on) > _SLOWER * statistics.median(off):
                why = f"steps took more than {_SLOWER:.0f} times as long with the change"
        if why and not made.note:
            self._keep(go_on=False)
            return replace(now, note=why)
        return now


def _typical(ranks: Sequence[RankSnapshot]) -> float:
    return max((rank.step_seconds or 0.0 for rank in ranks), default=0.0)


def _seconds_by_step(ranks: Sequence[RankSnapshot]) -> dict[int, float]:
    """Step -> its duration, the mean over the ranks; only steps that all of them have."""
    found: dict[int, list[float]] = {}
    for rank in ranks:
        for step in rank.recent:
            found.setdefault(step.step, []).append(step.seconds)
    return {n: statistics.fmean(each) for n, each in found.items() if len(each) == len(ranks)}


def _block(made: Trial, seconds: dict[int, float], number: int, end: int) -> list[float]:
    """The steps of a block before *end*, without its first, which the switch may disturb."""
    start = made.first + number * made.size
    steps = range(start + 1, min(end, start + made.size))
    return [seconds[step] for step in steps if step in seconds]


def _by_state(
    made: Trial, ranks: Sequence[RankSnapshot], end: int
) -> tuple[list[float], list[float]]:
    """The steps without and with the change."""
    seconds = _seconds_by_step(ranks)
    both: tuple[list[float], list[float]] = ([], [])
    for number in range(made.blocks):
        both[Plan.is_on(number)].extend(_block(made, seconds, number, end))
    return both


def judged(made: Trial, ranks: Sequence[RankSnapshot], end: int) -> Trial:
    """Returns *made* with its result; *end*: the step before which the change was undone."""
    seconds = _seconds_by_step(ranks)
    rare = made.change == Change.SHARED_COLLECTIONS
    figure = statistics.fmean if rare else statistics.median
    whole = (end - made.first) // made.size
    blocks = [_block(made, seconds, number, end) for number in range(whole)]
    blocks = blocks[: len(blocks) // A_ROUND * A_ROUND]
    if not blocks or not all(blocks):
        note = made.note or "no whole round of blocks is known"
        return replace(made, note=note)
    # a shared collection is part of the change; it runs between two steps
    on_steps = made.size * sum(Plan.is_on(number) for number in range(len(blocks)))
    undo = statistics.fmean(r.trial.undo_seconds if r.trial else 0.0 for r in ranks)
    extra = undo / on_steps if rare else 0.0
    figures = [figure(block) + extra * Plan.is_on(n) for n, block in enumerate(blocks)]
    gain = gain_in_turns(figures)
    assert gain is not None  # there is a whole round
    error = half_width(gain)
    note = made.note
    if error is None:
        note = note or f"fewer than {LEAST_ROUNDS} rounds: the noise is unknown"
    elif abs(gain.value) <= error:
        note = note or "the noise of the steps allows no verdict"
    return replace(
        made, steps=sum(map(len, blocks)), gain_seconds=gain.value, error_seconds=error, note=note
    )


def with_results(findings: Sequence[Finding], trials: Sequence[Trial]) -> tuple[Finding, ...]:
    """*findings*, with what was tried beside what is predicted."""
    results = {trial.rule: trial for trial in trials if trial.significant}
    return tuple(
        replace(
            finding,
            remedy=replace(
                finding.remedy,
                tried_seconds=results[finding.rule].gain_seconds,
                tried_error_seconds=results[finding.rule].error_seconds,
            ),
        )
        if finding.remedy is not None and finding.rule in results
        else finding
        for finding in findings
    )
