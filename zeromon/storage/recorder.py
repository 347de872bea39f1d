"""The record of one run on disk: the collector writes it, views of the past read it.

``<store>/runs/<run>/``: ``history/`` (every step), ``moments/`` (what the views showed), and
``findings.jsonl`` (when each finding came and went). When the disk refuses, writing stops and
:attr:`Record.note` says why; the run goes on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from zeromon.errors import RunNotFound, ZeromonError
from zeromon.fold.lanes import LAG_STEPS, lanes_of, shifts_of
from zeromon.ring import paths, slices
from zeromon.snapshot import RECENT_STEPS, Finding, RunSnapshot, Severity
from zeromon.snapshot.lanes import Lanes
from zeromon.storage import snapshot_log, step_history
from zeromon.storage.run_store import DEPTH, WHOLE_RUN, StepQuery
from zeromon.units import printable

_RANKS_A_SECOND = 32
"""Keeping snapshots of so many ranks every second costs a collector about 0.5 % of a core."""
_MAX_FINDINGS_BYTES = 4 << 20
_HISTORY, _MOMENTS, _FINDINGS = "history", "moments", "findings.jsonl"
_CANNOT = (ZeromonError, OSError, ImportError)


class Record:
    """Writes the record of one run; there is one writer."""

    def __init__(self, folder: Path) -> None:
        self.note = ""
        """Why writing has stopped; "" while it goes on."""
        self.last_step = 0
        """The last step in the history."""
        self._named, self._folder = folder, folder
        self._fd = -1
        self._last_wall = 0.0
        self._shown = {(one.rule, one.rank): (_state(one), one) for one in standing(folder)}
        self._steps: step_history.Writer | None = None
        self._moments: snapshot_log.Writer | None = None
        try:
            self._fd = paths.open_private(folder, DEPTH)
            self._folder = paths.by_descriptor(self._fd)
            self._steps = step_history.Writer(self._folder / _HISTORY)
            self._moments = snapshot_log.Writer(self._folder / _MOMENTS)
        except _CANNOT as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self.note = printable(str(error).replace(str(self._folder), str(self._named)))
        self.close()

    def close(self) -> None:
        """Stops writing; the record stays readable."""
        for writer in (self._steps, self._moments):
            if writer is not None:
                with suppress(OSError):
                    writer.close()
        self._steps = self._moments = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def keep(self, rows: Sequence[step_history.Row]) -> None:
        """Appends steps to the history."""
        if self._steps is not None:
            try:
                self._steps.append(rows)
                self.last_step = max((row[1] for row in rows), default=self.last_step)
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
        lines = [
            one if one.came else replace(one, came=run.taken_wall)
            for key, one in now.items()
            if _state(one) != self._shown.get(key, (None, None))[0]
        ]
        lines += [
            replace(one, gone=one.gone or run.taken_wall)
            for key, (_, one) in self._shown.items()
            if key not in now and one.gone is None
        ]
        self._shown = {key: (_state(one), one) for key, one in now.items()}
        if not lines:
            return
        path = self._folder / _FINDINGS
        with open(path, "ab", opener=paths.private_opener) as file:
            if file.tell() < _MAX_FINDINGS_BYTES:
                file.write(b"".join(_LINES.encode(line) + b"\n" for line in lines))


def _state(finding: Finding) -> tuple[Severity, float | None]:
    """The values whose change makes a record write a finding again: the text changes every second."""
    return finding.severity, finding.gone


# ---- reading --------------------------------------------------------------------------------------

_LINES = msgspec.json.Encoder()
_LINE = msgspec.json.Decoder(Finding)


def findings(folder: Path) -> list[Finding]:
    """Returns all findings of the run in *folder*, in the order in which they came.

    The last line about a finding is the one that counts; a broken line is skipped.
    """
    found: dict[tuple[str, int, float], Finding] = {}
    with suppress(OSError), (folder / _FINDINGS).open(errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                one = _LINE.decode(line)
                found[one.rule, one.rank, one.came] = one
    return list(found.values())


def standing(folder: Path) -> list[Finding]:
    """Returns the findings that the last writer of the record in *folder* showed last."""
    return [finding for finding in findings(folder) if finding.gone is None]


class Past:
    """Reads the record of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def span(self) -> tuple[float, float] | None:
        """Returns the first and the last snapshot's time, seconds since the epoch; None without any."""
        return snapshot_log.span(self._folder / _MOMENTS)

    def walls(self) -> list[float]:
        """Returns the times of all snapshots, seconds since the epoch."""
        return [moment.wall for moment in snapshot_log.moments(self._folder / _MOMENTS)]

    def at(self, wall: float) -> RunSnapshot:
        """Returns the snapshot at *wall* or the last before it; raises :class:`RunNotFound`."""
        snapshot = snapshot_log.at(self._folder / _MOMENTS, wall)
        if snapshot is None:
            raise RunNotFound(
                "nothing was kept of how this run was before",
                "It ended too soon, or its record is of an older zeromon.",
            )
        shift = round(snapshot.taken_wall * 1e9) - snapshot.taken_ns
        steps = step_history.last_steps(
            self._folder / _HISTORY, round(snapshot.taken_wall * 1e6), RECENT_STEPS
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
        return step_history.series(self._folder / _HISTORY, query)

    def lanes(self, steps: int, ranks: Sequence[int] = ()) -> Lanes:
        """The last *steps* steps as spans, from the rings on this node and those in the record."""
        rings = [*slices.of_run(self._folder.name, self._folder, steps + LAG_STEPS)]
        return lanes_of(rings, shifts_of(rings), steps=steps, ranks=ranks)

    def findings(self) -> list[Finding]:
        """See :func:`findings`."""
        return findings(self._folder)
