"""Requests traces from the live ranks of a run, waits for the traces, and starts their analysis.

A request is one file in the run's folder, which every agent reads once a second; the agents answer
through the rings. There is one request at a time. The analysis runs in a process of its own, because
it takes longer than the collector may pause.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeromon.base.errors import CaptureRefused, TrialRefused, os_errors_as
from zeromon.readout.breakdown import pace
from zeromon.readout.remedy import CHANGES, trial_obstacle
from zeromon.ring import paths, trial_words
from zeromon.ring.files import replace_file
from zeromon.ring.trial_words import MARGIN, MIN_BLOCK_STEPS, WORD, WORDS, Change, Plan
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot
from zeromon.snapshot.finding import RankTrial, Trial, TrialState
from zeromon.snapshot.levels import DEVICE_BOUND
from zeromon.snapshot.noise import MIN_ROUNDS, ROUND_BLOCKS, gain_in_turns, half_width
from zeromon.snapshot.step import Capture, CaptureState, TraceCheck
from zeromon.storage.run_store import DEPTH
from zeromon.traces.analysis import RESULT_FILE, RankTrace, read_analysis_result

MAX_CAPTURE_STEPS = 100
POLL_SECONDS = 2.5
"""How long an agent may take to read a request."""
_START_TIMEOUT_SECONDS = 60.0
_SAVE_TIMEOUT_SECONDS = 600.0
_ANALYSIS_SECONDS = 600.0
_TOO_LONG = "their analysis was ended after 10 min"
_MAX_REASONS = 4
REQUEST = "trace.json"


class Captures:
    """The traces of one run. Only :meth:`request` is called from other threads than the collector's."""

    def __init__(self, folder: Path, traces: Path) -> None:
        self._request_file = folder / REQUEST
        self._traces = traces
        self._lock = threading.Lock()
        self._requested_ns = 0
        self._analysis: subprocess.Popen[bytes] | None = None
        self._analysis_until = 0.0
        self.last: Capture | None = None
        self.checks: dict[int, TraceCheck] = {}
        """Rank -> comparison of live figures with those of the last trace."""

    def request(
        self, ranks: Sequence[RankSnapshot], steps: int, wanted_ranks: Sequence[int], now_ns: int
    ) -> Capture:
        """Requests a trace of *steps* steps from *wanted_ranks*; () means all of them.

        Raises :class:`CaptureRefused` while another capture runs, or when a rank cannot record.
        """
        with self._lock:
            if self.last is not None and self.busy:
                raise CaptureRefused(
                    f"trace {self.last.number} of this run is still {self.last.state}",
                    "One at a time: wait for it to end.",
                )
            chosen = _choose_ranks(ranks, steps, wanted_ranks)
            start_step = first_safe_step(chosen)
            # From the folders, so that a collector that starts again reuses no number
            numbers = [int(p.name) for p in self._traces.glob("*") if p.name.isdigit()]
            number = max(numbers, default=0) + 1
            folder = self._traces / str(number)
            os.close(paths.open_private_folder(folder, DEPTH + 2))
            capture = Capture(
                number=number,
                state=CaptureState.WAITING,
                first=start_step,
                steps=steps,
                ranks=tuple(rank.rank for rank in chosen),
                folder=str(folder),
            )
            self._write_request(capture)
            self.last, self._requested_ns = capture, now_ns
            return capture

    def _write_request(self, capture: Capture) -> None:
        body: dict[str, Any] = {"number": capture.number, "first": capture.first, "steps": capture.steps}
        body |= {"ranks": capture.ranks, "folder": capture.folder}
        with os_errors_as(CaptureRefused, f"write {self._request_file}"):
            replace_file(self._request_file, json.dumps(body))

    def follow(self, ranks: Sequence[RankSnapshot], now_ns: int) -> Capture | None:
        """Advances the last capture and returns it; None before the first."""
        with self._lock:
            capture = self.last
            if capture is not None and capture.state in (CaptureState.WAITING, CaptureState.RECORDING):
                self.last = self._update_recorded(capture, ranks, now_ns)
            elif capture is not None and capture.state == CaptureState.ANALYSING:
                self.last = self._finish_analysis(capture, ranks)
            return self.last

    def _update_recorded(self, capture: Capture, ranks: Sequence[RankSnapshot], now_ns: int) -> Capture:
        """Returns *capture* updated by the ranks' answers; starts the analysis after the last answer."""
        answers = {
            rank.rank: rank.requests.capture
            for rank in ranks
            if rank.requests.capture is not None and rank.requests.capture.request == capture.number
        }
        has_begun = any(answer.state != CaptureState.WAITING for answer in answers.values())
        waited = (now_ns - self._requested_ns) / 1e9
        # The ranks may take as long to reach the first step
        longest = max((rank.steps.median_seconds or 0.0 for rank in ranks), default=0.0)
        timeout = _SAVE_TIMEOUT_SECONDS if has_begun else max(_START_TIMEOUT_SECONDS, 20 * longest)
        alive = {rank.rank for rank in ranks if rank.status.alive}
        finished = {rank for rank, answer in answers.items() if answer.state.is_over}
        if any(rank in alive and rank not in finished for rank in capture.ranks) and waited < timeout:
            return replace(capture, state=CaptureState.RECORDING) if has_begun else capture
        with suppress(OSError):
            self._request_file.unlink()
        rank_files = (Path(capture.folder) / f"rank{rank}.json" for rank in capture.ranks)
        files = tuple(str(path) for path in rank_files if path.exists())
        reasons = [
            f"rank {rank}: {answers[rank].why}"
            for rank in capture.ranks
            if rank in answers and answers[rank].why
        ]
        reasons += [f"rank {rank} did not answer" for rank in capture.ranks if rank not in answers]
        note = "; ".join(reasons[:_MAX_REASONS])
        if not files:
            reason = note or f"no rank came to step {capture.first} in {waited:.0f} s"
            return replace(capture, state=CaptureState.FAILED, note=reason)
        try:
            self._analyse(capture.folder, files)
        except OSError as error:
            note = f"the traces are there, but cannot be analysed: {error.strerror}"
            return replace(capture, state=CaptureState.DONE, files=files, note=note)
        return replace(capture, state=CaptureState.ANALYSING, files=files, note=note)

    def _analyse(self, folder: str, files: Sequence[str]) -> None:
        command = [sys.executable, "-m", "zeromon", "trace", "analyze", "--json", *files]
        # The analysis imports zeromon from where this process has it, which may not be installed
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        result = os.open(Path(folder) / RESULT_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._analysis = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=subprocess.DEVNULL,
                # python -m imports from the current folder first: a json.py there would shadow json
                cwd="/",
            )
            self._analysis_until = time.monotonic() + _ANALYSIS_SECONDS
        finally:
            os.close(result)

    def _finish_analysis(self, capture: Capture, ranks: Sequence[RankSnapshot]) -> Capture:
        if self._analysis is not None and self._analysis.poll() is None:
            if time.monotonic() < self._analysis_until:
                return capture
            self._analysis.kill()
            # Without it the killed process stays a zombie, and its returncode None reads as success
            self._analysis.wait()
            capture = replace(capture, note=f"{capture.note or 'the traces are there'}, {_TOO_LONG}")
        code = self._analysis.returncode if self._analysis is not None else 1
        self._analysis = None
        if code:
            note = f"{capture.note or 'the traces are there'}, but cannot be analysed"
            return replace(capture, state=CaptureState.DONE, note=note)
        checks = compare_trace(read_analysis_result(Path(capture.folder)), ranks)
        self.checks.update(checks)
        return replace(capture, state=CaptureState.DONE, checks=checks)

    @property
    def busy(self) -> bool:
        """True if a capture is in progress."""
        return self.last is not None and self.last.is_open


def _choose_ranks(
    ranks: Sequence[RankSnapshot], steps: int, numbers: Sequence[int]
) -> list[RankSnapshot]:
    if not 1 <= steps <= MAX_CAPTURE_STEPS:
        raise CaptureRefused(f"between 1 and {MAX_CAPTURE_STEPS} steps, not {steps}")
    alive = [rank for rank in ranks if rank.status.alive]
    unknown = set(numbers) - {rank.rank for rank in alive}
    if unknown:
        names = ", ".join(map(str, sorted(unknown)))
        raise CaptureRefused(f"no live rank {names} on this node")
    chosen = [rank for rank in alive if not numbers or rank.rank in numbers]
    if not chosen:
        raise CaptureRefused("no rank of this run is alive", "A trace needs a live run.")
    if any(rank.steps.watched_steps < 1 for rank in chosen):
        raise CaptureRefused(
            "the first step has not ended yet", "Steps are what is recorded: wait for the first."
        )
    return chosen


def first_safe_step(ranks: Sequence[RankSnapshot]) -> int:
    """Returns the first step that no rank reaches before its agent has read the request."""
    newest_step = max(rank.steps.last_step for rank in ranks)
    fastest = min((rank.steps.median_seconds or POLL_SECONDS) for rank in ranks)
    return newest_step + 2 + math.ceil(POLL_SECONDS / max(fastest, 1e-4))


def compare_trace(analysis: Sequence[RankTrace], ranks: Sequence[RankSnapshot]) -> dict[int, TraceCheck]:
    """Returns rank -> comparison of its live figures with its trace, over the steps of both."""
    checks = {}
    by_rank = {rank.rank: rank for rank in ranks}
    for traced in analysis:
        rank = by_rank.get(traced.rank)
        if rank is None:
            continue
        live = {step.step: step for step in rank.steps.recent if step.timed}
        traced_steps = [step for step in traced.steps if step.step in live]
        if not traced_steps:
            continue
        live_steps = [live[step.step] for step in traced_steps]
        communication_ns = [step.communication_ns for step in live_steps]
        known_pace = pace(rank)
        checks[rank.rank] = TraceCheck(
            steps=tuple(step.step for step in traced_steps),
            live_exposed_seconds=sum(s.exposed_ns for s in live_steps) / 1e9,
            trace_exposed_seconds=sum(s.exposed_seconds for s in traced_steps),
            live_communication_seconds=(
                sum(communication_ns) / 1e9 if min(communication_ns) >= 0 else None
            ),
            trace_communication_seconds=sum(s.communication_seconds for s in traced_steps),
            launch_bound=known_pace is not None and known_pace.starved_ratio > DEVICE_BOUND,
        )
    return checks


# ---- changes that are tried ---------------------------------------------------------------------

# Requests trials of a finding's change from the live ranks of a run, and judges them.
# A request is one file in the run's folder (:mod:`zeromon.ring.trial_words`); the agents answer
# through the rings. There is one trial at a time. The file's time is the lease: the command renews
# it, and the agents undo the change where it is old or gone.

DEFAULT_ROUNDS = 6
MAX_ROUNDS = 12
_COLLECTIONS_SIZE = 20
"""Collections are rare: a block must hold some of them."""
_MAX_STEPS = 480
"""A snapshot has no more of the last steps."""
_TRIAL_START_SECONDS = 60.0
_STALLED_SECONDS, _STALLED_STEPS = 30.0, 20
"""A job whose newest step is older than both (seconds, median steps) gets its state back."""
_SLOWER = 3.0
"""So are the ranks when a step with the change takes so many times as long."""


class Trials:
    """The trials of one run. :meth:`request` and :meth:`renew_lease` are called from other threads."""

    def __init__(self, folder: Path) -> None:
        self._file, self._words = folder / trial_words.REQUEST, folder / WORDS
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
            reason = trial_obstacle(run, finding)
            if reason:
                raise TrialRefused(f"{finding.code} cannot be tried: {reason}")
            if not MIN_ROUNDS <= rounds <= MAX_ROUNDS:
                raise TrialRefused(f"between {MIN_ROUNDS} and {MAX_ROUNDS} rounds, not {rounds}")
            trial = self._plan_trial(run, finding, rounds)
            self._write_request(trial, rings)
            self._all, self._requested_ns = (*self._all, trial), now_ns
            return trial

    def _plan_trial(self, run: RunSnapshot, finding: Finding, rounds: int) -> Trial:
        change, remedy = CHANGES[finding.rule], finding.remedy
        assert remedy is not None  # trial_obstacle() refused it
        rare = change is Change.SHARED_COLLECTIONS
        size = min(_COLLECTIONS_SIZE if rare else MIN_BLOCK_STEPS, _MAX_STEPS // (ROUND_BLOCKS * rounds))
        numbers = [t.number for t in self._all] + [
            r.requests.trial.number for r in run.ranks if r.requests.trial
        ]
        return Trial(
            number=max(numbers, default=0) + 1,
            rule=finding.rule,
            code=finding.code,
            change=change,
            state=TrialState.WAITING,
            first=first_safe_step(run.ranks) + MARGIN + 2,  # and all have agreed
            size=size,
            blocks=ROUND_BLOCKS * rounds,
            dialect=remedy.dialect,
            diff=remedy.diff,
            gain_low_seconds=remedy.gain_low_seconds,
            gain_high_seconds=remedy.gain_high_seconds,
        )

    def _write_request(self, trial: Trial, rings: tuple[str, ...]) -> None:
        plan = Plan(trial.number, Change(trial.change), trial.first, trial.size, trial.blocks, rings)
        with os_errors_as(TrialRefused, f"write {self._file}"):
            # Before the request: an agent that reads it opens the words at once
            replace_file(self._words, bytes(WORD.size * len(rings)))
            replace_file(self._file, json.dumps(plan._asdict()))

    def renew_lease(self, number: int, *, go_on: bool) -> Trial:
        """Renews the lease of trial *number*, or ends it."""
        with self._lock:
            trial = next((trial for trial in self._all if trial.number == number), None)
            if trial is None:
                raise TrialRefused(f"the collector has no trial {number}")
            if trial.is_open:
                self._keep(go_on=go_on)
            return trial

    def _keep(self, *, go_on: bool) -> None:
        """Renews the file; or removes it, and the ranks undo the change before their next block."""
        with suppress(OSError):
            os.utime(self._file) if go_on else self._file.unlink()

    def follow(self, ranks: Sequence[RankSnapshot], now_ns: int) -> tuple[Trial, ...]:
        """Advances the newest trial; returns all."""
        with self._lock:
            if self._all and self._all[-1].is_open:
                self._all = (*self._all[:-1], self._advance_trial(self._all[-1], ranks, now_ns))
            return self._all

    def _advance_trial(self, trial: Trial, ranks: Sequence[RankSnapshot], now_ns: int) -> Trial:
        answers = [
            r.requests.trial
            for r in ranks
            if r.requests.trial and r.requests.trial.number == trial.number
        ]
        if any(not rank.status.alive for rank in ranks):
            self._keep(go_on=False)
            return replace(trial, state=TrialState.WITHDRAWN, note="a rank ended")
        finished = [answer for answer in answers if answer.state.is_over]
        if len(finished) < len(ranks):
            waited = (now_ns - self._requested_ns) / 1e9
            if not answers and waited > max(_TRIAL_START_SECONDS, 20 * _longest_step_seconds(ranks)):
                self._keep(go_on=False)
                return replace(
                    trial, state=TrialState.REFUSED, note=f"no rank answered in {waited:.0f} s"
                )
            return self._withdraw_if_slow(trial, answers, ranks, now_ns) if answers else trial
        self._keep(go_on=False)
        note = next((answer.why for answer in finished if answer.why), "")
        final_trial = replace(trial, state=finished[0].state, note=trial.note or note)
        if any(answer.state is TrialState.REFUSED for answer in finished):
            return replace(final_trial, state=TrialState.REFUSED)
        return judge_trial(final_trial, ranks, min(answer.step for answer in finished))

    def _withdraw_if_slow(
        self, trial: Trial, answers: Sequence[RankTrial], ranks: Sequence[RankSnapshot], now_ns: int
    ) -> Trial:
        """Ends a trial that stalls the job, or makes it much slower."""
        state = next((answer.state for answer in answers if not answer.state.is_over), trial.state)
        current = replace(trial, state=state)
        newest_ns = max((r.steps.recent[-1].end_ns for r in ranks if r.steps.recent), default=now_ns)
        silent, step = (now_ns - newest_ns) / 1e9, _longest_step_seconds(ranks)
        reason = ""
        if silent > max(_STALLED_SECONDS, _STALLED_STEPS * step):
            reason = f"no step ended for {silent:.0f} s"
        else:
            end_step = max(r.steps.last_step for r in ranks) + 1
            seconds = _seconds_by_step(ranks)
            off_on: tuple[list[float], list[float]] = ([], [])
            for number in range(current.blocks):
                off_on[Plan.is_on(number)].extend(_block_seconds(current, seconds, number, end_step))
            bare, tried = off_on
            if len(tried) > 2 and bare and statistics.median(tried) > _SLOWER * statistics.median(bare):
                reason = f"steps took more than {_SLOWER:.0f} times as long with the change"
        if reason and not trial.note:
            self._keep(go_on=False)
            return replace(current, note=reason)
        return current


def _longest_step_seconds(ranks: Sequence[RankSnapshot]) -> float:
    return max((rank.steps.median_seconds or 0.0 for rank in ranks), default=0.0)


def _seconds_by_step(ranks: Sequence[RankSnapshot]) -> dict[int, float]:
    """Step -> its duration, the mean over the ranks; only steps that all of them have."""
    durations: dict[int, list[float]] = {}
    for rank in ranks:
        for step in rank.steps.recent:
            durations.setdefault(step.step, []).append(step.seconds)
    return {n: statistics.fmean(times) for n, times in durations.items() if len(times) == len(ranks)}


def _block_seconds(trial: Trial, seconds: dict[int, float], number: int, end_step: int) -> list[float]:
    """The steps of a block before *end_step*, without its first, which the switch may disturb."""
    start = trial.first + number * trial.size
    steps = range(start + 1, min(end_step, start + trial.size))
    return [seconds[step] for step in steps if step in seconds]


def judge_trial(trial: Trial, ranks: Sequence[RankSnapshot], end_step: int) -> Trial:
    """Returns *trial* with its result; *end_step*: the step before which the change was undone."""
    seconds = _seconds_by_step(ranks)
    rare = trial.change == Change.SHARED_COLLECTIONS
    # A collection hits few steps, which a median leaves out
    average = statistics.fmean if rare else statistics.median
    block_count = (end_step - trial.first) // trial.size
    blocks = [_block_seconds(trial, seconds, number, end_step) for number in range(block_count)]
    # Whole rounds only: a linear drift cancels over off, on, on, off and over no part of it
    blocks = blocks[: len(blocks) // ROUND_BLOCKS * ROUND_BLOCKS]
    if not blocks or not all(blocks):
        return replace(trial, note=trial.note or "no whole round of blocks is known")
    # a shared collection is part of the change; it runs between two steps
    on_steps = trial.size * sum(Plan.is_on(number) for number in range(len(blocks)))
    undo = statistics.fmean(r.requests.trial.undo_seconds if r.requests.trial else 0.0 for r in ranks)
    extra = undo / on_steps if rare else 0.0
    block_seconds = [average(block) + extra * Plan.is_on(n) for n, block in enumerate(blocks)]
    gain = gain_in_turns(block_seconds)
    assert gain is not None  # there is a whole round
    error = half_width(gain)
    note = trial.note
    if error is None:
        note = note or f"fewer than {MIN_ROUNDS} rounds: the noise is unknown"
    elif abs(gain.value) <= error:
        note = note or "the noise of the steps allows no verdict"
    return replace(
        trial, steps=sum(map(len, blocks)), gain_seconds=gain.value, error_seconds=error, note=note
    )


def with_trial_results(findings: Sequence[Finding], trials: Sequence[Trial]) -> tuple[Finding, ...]:
    """*findings*, with what was tried beside what is predicted."""
    results = {trial.rule: trial for trial in trials if trial.is_significant}
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
