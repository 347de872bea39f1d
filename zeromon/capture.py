"""Asks the live ranks of a run for a trace, waits for it, and has it analysed beside the live figures.

The request is one file in the run's folder, which every agent looks at once a second; answers come
through the rings. One request at a time. The analysis is a process of its own: it may take longer than
the collector may stand still.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeromon import paths
from zeromon.errors import CaptureRefused
from zeromon.snapshot import Capture, RankSnapshot, TraceCheck

MOST_STEPS = 100
_LOOKS_EVERY_SECONDS = 2.5
_PATIENCE_SECONDS = 60.0
_SAVE_PATIENCE_SECONDS = 600.0
_OVER = ("saved", "refused", "failed")
REQUEST = "trace.json"


class Captures:
    """The traces of one run. :meth:`ask` may come from any thread; the rest is the collector's."""

    def __init__(self, folder: Path, traces: Path) -> None:
        self._request = folder / REQUEST
        self._traces = traces
        self._lock = threading.Lock()
        self._asked_ns = 0
        self._analysis: subprocess.Popen[bytes] | None = None
        self.last: Capture | None = None
        self.checks: dict[int, TraceCheck] = {}
        """By rank, of its last trace."""

    def ask(
        self, ranks: Sequence[RankSnapshot], steps: int, wanted: Sequence[int], now_ns: int
    ) -> Capture:
        """Asks *wanted* ranks (all, when empty) for *steps* steps; raises :class:`CaptureRefused`."""
        with self._lock:
            if self.last is not None and self.busy:
                raise CaptureRefused(
                    f"trace {self.last.number} of this run is still {self.last.state}",
                    "One at a time: wait for it to end.",
                )
            chosen = _chosen(ranks, steps, wanted)
            first = first_step(chosen)
            taken = [int(p.name) for p in self._traces.glob("*") if p.name.isdigit()]
            number = max(taken, default=0) + 1
            folder = paths.make_private(self._traces / str(number))
            made = Capture(
                number=number,
                state="waiting",
                first=first,
                steps=steps,
                ranks=tuple(rank.rank for rank in chosen),
                folder=str(folder),
            )
            self._write(made)
            self.last, self._asked_ns = made, now_ns
            return made

    def _write(self, made: Capture) -> None:
        content = {"number": made.number, "first": made.first, "steps": made.steps}
        temporary = self._request.with_name(f".{REQUEST}.{os.getpid()}")
        try:
            temporary.write_text(
                json.dumps({**content, "ranks": made.ranks, "folder": made.folder})
            )
            temporary.replace(self._request)
        except OSError as error:
            raise CaptureRefused(f"cannot write {self._request}: {error.strerror}") from error

    def follow(self, ranks: Sequence[RankSnapshot], now_ns: int) -> Capture | None:
        """The last trace as it stands now; goes on with it."""
        with self._lock:
            made = self.last
            if made is not None and made.state in ("waiting", "recording"):
                self.last = self._recorded(made, ranks, now_ns)
            elif made is not None and made.state == "analysing":
                self.last = self._analysed(made, ranks)
            return self.last

    def _recorded(self, made: Capture, ranks: Sequence[RankSnapshot], now_ns: int) -> Capture:
        answers = {
            rank.rank: rank.capture
            for rank in ranks
            if rank.capture is not None and rank.capture.request == made.number
        }
        alive = {rank.rank for rank in ranks if rank.alive}
        open_ones = [
            rank
            for rank in made.ranks
            if rank in alive and (rank not in answers or answers[rank].state not in _OVER)
        ]
        begun = any(answer.state != "waiting" for answer in answers.values())
        waited = (now_ns - self._asked_ns) / 1e9
        patience = max(
            _PATIENCE_SECONDS, 20 * max((r.step_seconds or 0.0 for r in ranks), default=0.0)
        )
        if open_ones and waited < (_SAVE_PATIENCE_SECONDS if begun else patience):
            return replace(made, state="recording") if begun else made
        self.withdraw()
        files = tuple(
            path
            for rank in made.ranks
            if (path := str(Path(made.folder) / f"rank{rank}.json")) and Path(path).exists()
        )
        reasons = [
            f"rank {rank}: {answers[rank].why}"
            for rank in made.ranks
            if rank in answers and answers[rank].why
        ]
        reasons += [f"rank {rank} did not answer" for rank in made.ranks if rank not in answers]
        note = "; ".join(reasons[:4])
        if not files:
            why = note or f"no rank came to step {made.first} in {waited:.0f} s"
            return replace(made, state="failed", note=why)
        try:
            self._analyse(made.folder, files)
        except OSError as error:
            note = f"the traces are there, but cannot be analysed: {error.strerror}"
            return replace(made, state="done", files=files, note=note)
        return replace(made, state="analysing", files=files, note=note)

    def _analyse(self, folder: str, files: Sequence[str]) -> None:
        command = [sys.executable, "-m", "zeromon", "trace", "analyze", "--json", *files]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        result = os.open(
            Path(folder) / "analysis.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
        )
        try:
            self._analysis = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )
        finally:
            os.close(result)

    def _analysed(self, made: Capture, ranks: Sequence[RankSnapshot]) -> Capture:
        if self._analysis is not None and self._analysis.poll() is None:
            return made
        code = self._analysis.returncode if self._analysis is not None else 1
        self._analysis = None
        if code:
            return replace(made, state="done", note=f"{made.note or 'the traces are there'}, but "
                           "cannot be analysed")  # fmt: skip
        checks = compare(read_analysis(Path(made.folder)), ranks)
        self.checks.update(checks)
        return replace(made, state="done", checks=checks)

    def withdraw(self) -> None:
        """Takes the request away, also one that was never answered."""
        with suppress(OSError):
            self._request.unlink()

    @property
    def busy(self) -> bool:
        """Whether a trace is under way."""
        return self.last is not None and is_open(self.last)


def is_open(made: Capture) -> bool:
    """Whether a capture has not come to its end."""
    return made.state not in ("done", "failed")


def progress(made: Capture, step: int) -> str:
    """How far a capture is, in words; *step*: the newest that has ended."""
    if made.state == "waiting":
        return f"trace {made.number}: begins with step {made.first}, step {step} has ended"
    if made.state == "recording":
        last = made.first + made.steps - 1
        return f"trace {made.number}: {'saving' if step >= last else 'recording'}"
    return f"trace {made.number}: {made.state}"


def _chosen(ranks: Sequence[RankSnapshot], steps: int, wanted: Sequence[int]) -> list[RankSnapshot]:
    if not 1 <= steps <= MOST_STEPS:
        raise CaptureRefused(f"between 1 and {MOST_STEPS} steps, not {steps}")
    alive = [rank for rank in ranks if rank.alive]
    unknown = set(wanted) - {rank.rank for rank in alive}
    if unknown:
        names = ", ".join(map(str, sorted(unknown)))
        raise CaptureRefused(f"no live rank {names} on this node")
    chosen = [rank for rank in alive if not wanted or rank.rank in wanted]
    if not chosen:
        raise CaptureRefused("no rank of this run is alive", "A trace needs a live run.")
    if any(rank.steps < 1 for rank in chosen):
        raise CaptureRefused(
            "the first step has not ended yet", "Steps are what is recorded: wait for the first."
        )
    return chosen


def first_step(ranks: Sequence[RankSnapshot]) -> int:
    """The first step that every rank will have been told of before it comes there."""
    newest = max(rank.step for rank in ranks)
    fastest = min((rank.step_seconds or _LOOKS_EVERY_SECONDS) for rank in ranks)
    return newest + 2 + math.ceil(_LOOKS_EVERY_SECONDS / max(fastest, 1e-4))


def read_analysis(folder: Path) -> list[dict[str, Any]]:
    """What ``zeromon trace analyze`` said of each rank; empty when it cannot be read."""
    try:
        content = json.loads((folder / "analysis.json").read_text())
        ranks = content["ranks"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []


def compare(
    analysis: Sequence[dict[str, Any]], ranks: Sequence[RankSnapshot]
) -> dict[int, TraceCheck]:
    """Live figures beside the traces', by rank, over the steps that both have."""
    found = {}
    by_rank = {rank.rank: rank for rank in ranks}
    for traced in analysis:
        rank = by_rank.get(int(traced.get("rank", -1)))
        if rank is None:
            continue
        live = {step.step: step for step in rank.recent if not step.idle}
        both = [step for step in traced.get("steps", ()) if step.get("step") in live]
        if not both:
            continue
        own = [live[step["step"]] for step in both]
        found[rank.rank] = TraceCheck(
            steps=tuple(step["step"] for step in both),
            live_exposed_seconds=sum(s.exposed_ns for s in own) / 1e9,
            trace_exposed_seconds=sum(float(s["exposed_seconds"]) for s in both),
            live_communication_seconds=sum(s.communication_ns for s in own) / 1e9,
            trace_communication_seconds=sum(float(s["communication_seconds"]) for s in both),
        )
    return found
