"""Requests traces from the live ranks of a run, waits for the traces, and starts their analysis.

A request is one file in the run's folder, which every agent reads once a second; the agents answer
through the rings. There is one request at a time. The analysis runs in a process of its own, because
it takes longer than the collector may pause.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeromon.base.errors import CaptureRefused, os_errors_as
from zeromon.readout.breakdown import pace
from zeromon.ring import paths
from zeromon.ring.files import replace_file
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.levels import DEVICE_BOUND
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
