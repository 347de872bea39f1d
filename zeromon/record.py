"""What is kept of one run, written by its collector and read by whoever looks back.

``<store>/runs/<run>/``: ``history/`` (every step), ``moments/`` (what the views showed), and
``findings.jsonl`` (when each finding came and went). When the disk refuses, writing stops and
:attr:`Record.note` says why; the run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeromon import history, moments, paths
from zeromon.errors import RunNotFound, ZeromonError
from zeromon.snapshot import RECENT_STEPS, RunSnapshot

_RANKS_A_SECOND = 32
"""Keeping the picture of so many ranks every second costs a collector about 0.5 % of a core."""
_MOST_FINDINGS_BYTES = 4 << 20
_CANNOT = (ZeromonError, OSError, ImportError)


def _history(folder: Path) -> Path:
    return folder / "history"


def _moments(folder: Path) -> Path:
    return folder / "moments"


def _findings(folder: Path) -> Path:
    return folder / "findings.jsonl"


class Record:
    """The one writer of a run's record."""

    def __init__(self, folder: Path) -> None:
        self.note = ""
        """Why nothing is written any more, "" while it is."""
        self._folder = folder
        self._last_wall = 0.0
        self._shown = {(known.rule, known.rank) for known in findings(folder) if known.gone is None}
        self._steps: history.Writer | None = None
        self._moments: moments.Writer | None = None
        try:
            self._steps = history.Writer(_history(folder))
            self._moments = moments.Writer(_moments(folder))
        except _CANNOT as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self.note = str(error)
        self.close()

    def close(self) -> None:
        """Ends the writing; what was kept stays readable."""
        for writer in (self._steps, self._moments):
            if writer is not None:
                with suppress(OSError):
                    writer.close()
        self._steps = self._moments = None

    def keep(self, rows: Iterable[history.Row]) -> None:
        """Keeps steps."""
        if self._steps is not None:
            try:
                self._steps.append(rows)
            except _CANNOT as error:
                self._stop(error)

    def see(self, run: RunSnapshot) -> None:
        """Keeps the picture when it is due, and what came or went since the last."""
        if self._moments is None:
            return
        due = max(1.0, len(run.ranks) / _RANKS_A_SECOND) - 0.1
        try:
            self._note_findings(run)
            if run.ranks and (run.ended or abs(run.taken_wall - self._last_wall) >= due):
                self._moments.append(run)
                self._last_wall = run.taken_wall
        except _CANNOT as error:
            self._stop(error)
        if run.ended:
            self.close()

    def _note_findings(self, run: RunSnapshot) -> None:
        now = {(finding.rule, finding.rank): finding for finding in run.findings}
        if now.keys() == self._shown:
            return
        lines = [
            {
                "wall": run.taken_wall, "rule": finding.rule, "rank": finding.rank,
                "code": finding.code, "severity": finding.severity, "text": finding.text,
            }
            for key, finding in now.items()
            if key not in self._shown
        ]  # fmt: skip
        lines += [
            {"wall": run.taken_wall, "rule": rule, "rank": rank, "gone": True}
            for rule, rank in self._shown - now.keys()
        ]
        path = _findings(self._folder)
        with open(path, "a", opener=paths.private_opener) as file:
            if file.tell() < _MOST_FINDINGS_BYTES:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._shown = set(now)


# ---- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFinding:
    """A finding that a run had for some time."""

    rule: str
    rank: int
    code: str
    severity: str
    text: str
    came: float
    """Seconds since the epoch."""
    gone: float | None
    """None: it stood when the record ended, or still does."""


def findings(folder: Path) -> list[KnownFinding]:
    """All findings that the run in *folder* ever showed, in the order in which they came."""
    found: list[KnownFinding] = []
    standing: dict[tuple[str, int], int] = {}
    for line in _lines(_findings(folder)):
        try:
            key, wall = (str(line["rule"]), int(line["rank"])), float(line["wall"])
            if line.get("gone"):
                if key in standing:
                    at = standing.pop(key)
                    found[at] = replace(found[at], gone=wall)
                continue
            texts = {name: str(line[name]) for name in ("code", "severity", "text")}
        except (KeyError, TypeError, ValueError):
            continue
        standing[key] = len(found)
        found.append(KnownFinding(rule=key[0], rank=key[1], came=wall, gone=None, **texts))
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of lines; what is torn or foreign is passed over."""
    with suppress(OSError), path.open(errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                content = json.loads(line)
                if isinstance(content, dict):
                    yield content


class Past:
    """The record of a run, to look back at."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def span(self) -> tuple[float, float] | None:
        """The first kept moment and the last, seconds since the epoch; None without any."""
        return moments.span(_moments(self._folder))

    def walls(self) -> list[float]:
        """All kept moments, seconds since the epoch."""
        return [moment.wall for moment in moments.moments(_moments(self._folder))]

    def at(self, wall: float) -> RunSnapshot:
        """The picture at *wall* or nearest before it; raises :class:`RunNotFound` without any."""
        picture = moments.at(_moments(self._folder), wall)
        if picture is None:
            raise RunNotFound(
                "nothing was kept of how this run was before",
                "It ended too soon, or its record is of an older zeromon.",
            )
        shift = round(picture.taken_wall * 1e9) - picture.taken_ns
        steps = history.last_steps(
            _history(self._folder), round(picture.taken_wall * 1e6), RECENT_STEPS
        )
        ranks = [
            replace(
                rank,
                recent=tuple(history.step_of(row, shift) for row in steps.get(rank.rank, ())),
            )
            for rank in picture.ranks
        ]
        return replace(picture, ranks=tuple(ranks))

    def series(
        self,
        since_us: int = 0,
        until_us: int | None = None,
        ranks: Sequence[int] = (),
        most: int = 600,
    ) -> history.Series:
        """See :func:`zeromon.history.series`."""
        return history.series(_history(self._folder), since_us, until_us, ranks, most)

    def findings(self) -> list[KnownFinding]:
        """See :func:`findings`."""
        return findings(self._folder)
