"""The record of one run on disk: the collector writes it, views of the past read it.

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

import msgspec

from zeromon.errors import RunNotFound, ZeromonError
from zeromon.fold.lanes import LAG_STEPS, lanes_of, shifts_of
from zeromon.ring import paths, slices
from zeromon.snapshot import RECENT_STEPS, RunSnapshot, Severity
from zeromon.snapshot.lanes import Lanes
from zeromon.storage import snapshot_log, step_history
from zeromon.storage.step_query import WHOLE_RUN, StepQuery
from zeromon.units import printable

_RANKS_A_SECOND = 32
"""Keeping snapshots of so many ranks every second costs a collector about 0.5 % of a core."""
_MOST_FINDINGS_BYTES = 4 << 20
_CANNOT = (ZeromonError, OSError, ImportError)


def _history(folder: Path) -> Path:
    return folder / "history"


def _moments(folder: Path) -> Path:
    return folder / "moments"


def _findings(folder: Path) -> Path:
    return folder / "findings.jsonl"


class Record:
    """Writes the record of one run; there is one writer."""

    def __init__(self, folder: Path) -> None:
        self.note = ""
        """Why writing has stopped; "" while it goes on."""
        self._folder = folder
        self._last_wall = 0.0
        self._shown = {(known.rule, known.rank) for known in findings(folder) if known.gone is None}
        self._steps: step_history.Writer | None = None
        self._moments: snapshot_log.Writer | None = None
        try:
            self._steps = step_history.Writer(_history(folder))
            self._moments = snapshot_log.Writer(_moments(folder))
        except _CANNOT as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self.note = printable(str(error))
        self.close()

    def close(self) -> None:
        """Stops writing; the record stays readable."""
        for writer in (self._steps, self._moments):
            if writer is not None:
                with suppress(OSError):
                    writer.close()
        self._steps = self._moments = None

    def keep(self, rows: Iterable[step_history.Row]) -> None:
        """Appends steps to the history."""
        if self._steps is not None:
            try:
                self._steps.append(rows)
            except _CANNOT as error:
                self._stop(error)

    def see(self, run: RunSnapshot) -> None:
        """Appends the snapshot when it is due, and the findings that came or went since."""
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
    """A finding of a run, with the time in which the run had it."""

    rule: str
    rank: int
    code: str
    severity: Severity
    text: str
    came: float
    """When it came, seconds since the epoch."""
    gone: float | None
    """When it went; None: it was there when the record ended, or is there now."""


def findings(folder: Path) -> list[KnownFinding]:
    """Returns all findings of the run in *folder*, in the order in which they came."""
    found: list[KnownFinding] = []
    standing: dict[tuple[str, int], int] = {}
    for line in _lines(_findings(folder)):
        key = line.rule, line.rank
        if line.gone and key in standing:
            at = standing.pop(key)
            found[at] = replace(found[at], gone=line.wall)
        elif not line.gone and line.severity is not None:
            standing[key] = len(found)
            found.append(
                KnownFinding(rule=line.rule, rank=line.rank, code=line.code, text=line.text,
                             severity=line.severity, came=line.wall, gone=None)
            )  # fmt: skip
    return found


class _Line(msgspec.Struct):
    """A finding that came, or with less of it that it is gone."""

    wall: float
    rule: str
    rank: int
    code: str = ""
    severity: Severity | None = None
    text: str = ""
    gone: bool = False


_LINE = msgspec.json.Decoder(_Line)


def _lines(path: Path) -> Iterator[_Line]:
    """Yields the lines of a file of findings; skips what is none."""
    with suppress(OSError), path.open(errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                yield _LINE.decode(line)


class Past:
    """Reads the record of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def span(self) -> tuple[float, float] | None:
        """Returns the first and the last snapshot's time, seconds since the epoch; None without any."""
        return snapshot_log.span(_moments(self._folder))

    def walls(self) -> list[float]:
        """Returns the times of all snapshots, seconds since the epoch."""
        return [moment.wall for moment in snapshot_log.moments(_moments(self._folder))]

    def at(self, wall: float) -> RunSnapshot:
        """Returns the snapshot at *wall* or the last before it; raises :class:`RunNotFound`."""
        snapshot = snapshot_log.at(_moments(self._folder), wall)
        if snapshot is None:
            raise RunNotFound(
                "nothing was kept of how this run was before",
                "It ended too soon, or its record is of an older zeromon.",
            )
        shift = round(snapshot.taken_wall * 1e9) - snapshot.taken_ns
        steps = step_history.last_steps(
            _history(self._folder), round(snapshot.taken_wall * 1e6), RECENT_STEPS
        )
        ranks = [
            replace(
                rank,
                recent=tuple(step_history.step_of(row, shift) for row in steps.get(rank.rank, ())),
            )
            for rank in snapshot.ranks
        ]
        return replace(snapshot, run=self._folder.name, ranks=tuple(ranks))

    def series(self, query: StepQuery = WHOLE_RUN) -> step_history.Series:
        """The steps that *query* selects; see :func:`zeromon.storage.step_history.series`."""
        return step_history.series(_history(self._folder), query)

    def lanes(self, steps: int, ranks: Sequence[int] = ()) -> Lanes:
        """The last *steps* steps as spans, from the rings on this node and those in the record."""
        rings = [*slices.of_run(self._folder.name, self._folder, steps + LAG_STEPS)]
        return lanes_of(rings, shifts_of(rings), steps=steps, ranks=ranks)

    def findings(self) -> list[KnownFinding]:
        """See :func:`findings`."""
        return findings(self._folder)
