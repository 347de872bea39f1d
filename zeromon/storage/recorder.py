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

from zeromon.base.errors import RunNotFound, ZeromonError
from zeromon.base.units import printable
from zeromon.fold.lanes import LAG_STEPS, lanes_of_rings, node_clock_shifts
from zeromon.ring import paths, slices
from zeromon.snapshot import RECENT_STEPS, Finding, RunSnapshot, Severity
from zeromon.snapshot.step import Lanes
from zeromon.storage import snapshot_log, step_history
from zeromon.storage.run_store import DEPTH, WHOLE_RUN, StepQuery

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
        self._shown = {(f.rule, f.rank): (_finding_state(f), f) for f in standing_findings(folder)}
        self._steps: step_history.Writer | None = None
        self._moments: snapshot_log.Writer | None = None
        try:
            self._fd = paths.open_private_folder(folder, DEPTH)
            self._folder = paths.path_by_descriptor(self._fd)
            self._steps = step_history.Writer(self._folder / _HISTORY)
            self._moments = snapshot_log.Writer(self._folder / _MOMENTS)
        except _CANNOT as error:
            self._stop_writing(error)

    def _stop_writing(self, error: Exception) -> None:
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
                self._stop_writing(error)

    def see(self, run: RunSnapshot) -> None:
        """Appends the snapshot when it is due, and the findings that came or went since."""
        if self._moments is None:
            return
        interval = max(1.0, len(run.ranks) / _RANKS_A_SECOND) - 0.1
        try:
            self._note_findings(run)
            if run.ranks and (run.ended or abs(run.taken_wall - self._last_wall) >= interval):
                self._moments.append(run)
                self._last_wall = run.taken_wall
        except _CANNOT as error:
            self._stop_writing(error)
        if run.ended:
            self.close()

    def _note_findings(self, run: RunSnapshot) -> None:
        current = {(finding.rule, finding.rank): finding for finding in run.findings}
        changed = [
            finding if finding.came else replace(finding, came=run.taken_wall)
            for key, finding in current.items()
            if _finding_state(finding) != self._shown.get(key, (None, None))[0]
        ]
        changed += [
            replace(finding, gone=finding.gone or run.taken_wall)
            for key, (_, finding) in self._shown.items()
            if key not in current and finding.gone is None
        ]
        self._shown = {key: (_finding_state(finding), finding) for key, finding in current.items()}
        if not changed:
            return
        path = self._folder / _FINDINGS
        with open(path, "ab", opener=paths.open_private_file) as file:
            if file.tell() < _MAX_FINDINGS_BYTES:
                file.write(b"".join(_LINES.encode(finding) + b"\n" for finding in changed))


def _finding_state(finding: Finding) -> tuple[Severity, float | None]:
    """The values whose change makes a record write a finding again: the text changes every second."""
    return finding.severity, finding.gone


# ---- reading --------------------------------------------------------------------------------------

_LINES = msgspec.json.Encoder()
_LINE = msgspec.json.Decoder(Finding)


def findings_of_record(folder: Path) -> list[Finding]:
    """Returns all findings of the run in *folder*, in the order in which they came.

    The last line about a finding is the one that counts; a broken line is skipped.
    """
    by_key: dict[tuple[str, int, float], Finding] = {}
    with suppress(OSError), (folder / _FINDINGS).open(errors="replace") as file:
        for json_line in file:
            with suppress(ValueError, RecursionError):
                finding = _LINE.decode(json_line)
                by_key[finding.rule, finding.rank, finding.came] = finding
    return list(by_key.values())


def standing_findings(folder: Path) -> list[Finding]:
    """Returns the findings that the last writer of the record in *folder* showed last."""
    return [finding for finding in findings_of_record(folder) if finding.gone is None]


class Past:
    """Reads the record of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def span(self) -> tuple[float, float] | None:
        """Returns the first and the last snapshot's time, seconds since the epoch; None without any."""
        return snapshot_log.span_of_log(self._folder / _MOMENTS)

    def snapshot_times(self) -> list[float]:
        """Returns the times of all snapshots, seconds since the epoch."""
        return [entry.wall for entry in snapshot_log.logged_snapshots(self._folder / _MOMENTS)]

    def at(self, wall_time: float) -> RunSnapshot:
        """Returns the snapshot at *wall_time* or the last before it; raises :class:`RunNotFound`."""
        snapshot = snapshot_log.snapshot_at_time(self._folder / _MOMENTS, wall_time)
        if snapshot is None:
            raise RunNotFound(
                "nothing was kept of how this run was before",
                "It ended too soon, or its record is of an older zeromon.",
            )
        shift = round(snapshot.taken_wall * 1e9) - snapshot.taken_ns
        steps = step_history.last_steps_before(
            self._folder / _HISTORY, round(snapshot.taken_wall * 1e6), RECENT_STEPS
        )
        ranks = [
            replace(
                rank, recent=tuple(step_history.step_of(row, shift) for row in steps.get(rank.rank, ()))
            )
            for rank in snapshot.ranks
        ]
        return replace(snapshot, run=self._folder.name, ranks=tuple(ranks))

    def series(self, query: StepQuery = WHOLE_RUN) -> step_history.Series:
        """The steps that *query* selects; see :func:`zeromon.storage.step_history.series_of_steps`."""
        return step_history.series_of_steps(self._folder / _HISTORY, query)

    def lanes(self, steps: int, ranks: Sequence[int] = ()) -> Lanes:
        """The last *steps* steps as spans, from the rings on this node and those in the record."""
        rings = [*slices.run_events(self._folder.name, self._folder, steps + LAG_STEPS)]
        return lanes_of_rings(rings, node_clock_shifts(rings), steps=steps, ranks=ranks)

    def findings(self) -> list[Finding]:
        """See :func:`findings_of_record`."""
        return findings_of_record(self._folder)
