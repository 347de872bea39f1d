"""The recorder of a run, and the log of its snapshots: appended, thinned when it grows too large.

``<run>/moments/`` holds numbered segments of compressed snapshots with a checksum each; what was written
outlives its writer. When all segments take more than a limit, the two oldest of those that were thinned
least become one, with every second snapshot of both. The newest snapshots are about a second apart, the
older ones ever further.

A snapshot is logged without its last steps: :mod:`zeromon.storage.step_history` has them.
"""

import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from zeromon.base.errors import HistoryError, RunNotFound, ZeromonError, os_errors_as
from zeromon.base.units import printable
from zeromon.fold.lanes import LAG_STEPS, lanes_of_rings, node_clock_shifts
from zeromon.ring import paths, slices
from zeromon.ring.files import replacing_file
from zeromon.snapshot import Finding, RunSnapshot, Severity
from zeromon.snapshot.step import RECENT_STEPS, Lanes
from zeromon.storage import run_store
from zeromon.storage.step_history.queries import last_steps_before, series_of_steps
from zeromon.storage.step_history.rows import Row, Series, row_of, step_of
from zeromon.storage.step_history.writer import Writer as StepWriter

MAGIC = b"ZMMOMT\0\1"
SEGMENT_MOMENTS = 256
LIMIT_BYTES = 128 << 20
_HEAD = struct.Struct("<IIq")
"""Length of the compressed snapshot, CRC of its time and itself, time in milliseconds."""
_MOMENT = struct.Struct("<q")
_MAX_BYTES = 1 << 28
_KEPT_WHOLE = 3
_SUFFIX = ".moments"
_NAME = re.compile(r"[0-9]{7,}-[0-9]{7,}\.moments")


@dataclass(frozen=True, slots=True)
class LoggedSnapshot:
    """The position of a snapshot in the log."""

    wall: float
    """Seconds since the epoch."""
    path: Path
    offset: int
    nbytes: int
    """Size with its header."""


def without_recent_steps(run: RunSnapshot) -> RunSnapshot:
    """Returns *run* without the steps that the history has."""
    return replace(run, ranks=tuple(rank.with_recent(()) for rank in run.ranks))


# ---- writing --------------------------------------------------------------------------------------


class Writer:
    """Appends to the log in *folder*. Every method raises :class:`HistoryError` on a disk error."""

    def __init__(
        self, folder: Path, *, segment_moments: int = SEGMENT_MOMENTS, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.folder = paths.make_private_folder(folder)
        self._segment_moments = segment_moments
        self._limit = limit_bytes
        with os_errors_as(HistoryError, f"write {folder}"):
            existing = segment_paths(self.folder)
            for path in self.folder.iterdir():
                # half of a segment, or one that was thinned and not yet removed
                if path not in existing and _SUFFIX in path.name:
                    path.unlink(missing_ok=True)
            self._number = _segment_numbers(existing[-1])[1] if existing else 1
            self._last_ms = round(entry.wall * 1000) if (entry := newest_snapshot(self.folder)) else 0
            self._open_segment()

    def _open_segment(self) -> None:
        path = self.folder / _segment_name(self._number, self._number)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        entries = list(index_segment(path))
        self._count = len(entries)
        end_offset = entries[-1].offset + entries[-1].nbytes if entries else 0
        os.ftruncate(self._fd, end_offset)  # a torn end is cut off
        if not end_offset:
            os.write(self._fd, MAGIC)

    def append(self, run: RunSnapshot) -> None:
        """Appends *run*. One that is not newer than the last gets a time right behind it."""
        time_ms = max(round(run.taken_wall * 1000), self._last_ms + 1)
        payload = zlib.compress(run_store.encode_snapshot(without_recent_steps(run)), 6)
        crc = zlib.crc32(_MOMENT.pack(time_ms) + payload)
        blob = _HEAD.pack(len(payload), crc, time_ms) + payload
        with os_errors_as(HistoryError, f"write {self.folder}"):
            nbytes = os.write(self._fd, blob)
            if nbytes < len(blob):
                raise HistoryError(f"cannot write {self.folder}: no space left")
            self._last_ms = time_ms
            self._count += 1
            if self._count >= self._segment_moments:
                self.close()
                self._number += 1
                self._open_segment()
                thin_oldest_segments(self.folder, self._limit)

    def close(self) -> None:
        """Closes the segment."""
        if self._fd >= 0:
            # In this order: a second close() must not close a number that another file has got
            fd, self._fd = self._fd, -1
            os.close(fd)


def thin_oldest_segments(folder: Path, limit_bytes: int) -> None:
    """Thins the oldest of the least thinned segments until all take at most *limit_bytes*."""
    while sum(path.stat().st_size for path in segment_paths(folder)) > limit_bytes:
        older = segment_paths(folder)[:-_KEPT_WHOLE]
        pairs = [(a, b) for a, b in pairwise(older) if _segment_width(a) == _segment_width(b)]
        if pairs:
            _join_two_segments(*min(pairs, key=lambda pair: (_segment_width(pair[0]), pair)))
        elif older:
            older[0].unlink()
        else:
            return


def _join_two_segments(older: Path, newer: Path) -> None:
    """Replaces two segments by one with every second snapshot of both."""
    entries = [*index_segment(older), *index_segment(newer)][::2]
    joined = older.with_name(_segment_name(_segment_numbers(older)[0], _segment_numbers(newer)[1]))
    with replacing_file(joined) as temporary, temporary.open("wb") as file:
        file.write(MAGIC)
        for entry in entries:
            with entry.path.open("rb") as source:
                source.seek(entry.offset)
                file.write(source.read(entry.nbytes))
    for path in (older, newer):  # no longer read: what stands for them is there
        path.unlink()


def _segment_name(first_number: int, last_number: int) -> str:
    return f"{first_number:07}-{last_number:07}{_SUFFIX}"


def _segment_numbers(path: Path) -> tuple[int, int]:
    first_number, last_number = path.stem.split("-")
    return int(first_number), int(last_number)


def _segment_width(path: Path) -> int:
    """Returns how many segments *path* replaces: one snapshot in so many is left."""
    first_number, last_number = _segment_numbers(path)
    return last_number - first_number + 1


# ---- reading --------------------------------------------------------------------------------------


def segment_paths(folder: Path) -> list[Path]:
    """Returns all segments in the order of time, without those that another one replaces."""
    files: list[Path] = []
    for path in sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.name):
        if not _NAME.fullmatch(path.name):
            continue
        first_number, last_number = _segment_numbers(path)
        # Names sort by first, then last: a wider one
        while files and _segment_numbers(files[-1])[0] >= first_number:
            files.pop()
        if not files or _segment_numbers(files[-1])[1] < last_number:
            files.append(path)
    return files


def index_segment(path: Path) -> Iterator[LoggedSnapshot]:
    """Yields the positions in a segment, up to the first broken one, without reading the snapshots."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(MAGIC)) != MAGIC:
            return
        offset = len(MAGIC)
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, _, time_ms = _HEAD.unpack(head)
            next_offset = offset + _HEAD.size + length
            if length > _MAX_BYTES or next_offset > size:
                return
            yield LoggedSnapshot(time_ms / 1000, path, offset, _HEAD.size + length)
            file.seek(next_offset)
            offset = next_offset


def logged_snapshots(folder: Path) -> Iterator[LoggedSnapshot]:
    """Yields the positions of all snapshots in the order of time."""
    for path in segment_paths(folder):
        yield from index_segment(path)


def newest_snapshot(folder: Path) -> LoggedSnapshot | None:
    """Returns the position of the last snapshot; None without any."""
    for path in reversed(segment_paths(folder)):
        entries = list(index_segment(path))
        if entries:
            return entries[-1]
    return None


def span_of_log(folder: Path) -> tuple[float, float] | None:
    """Returns the first and the last snapshot's time, seconds since the epoch; None without any."""
    head, tail = next(logged_snapshots(folder), None), newest_snapshot(folder)
    return None if head is None or tail is None else (head.wall, tail.wall)


def snapshot_at_time(folder: Path, wall_time: float) -> RunSnapshot | None:
    """Returns the snapshot at *wall_time*, else the last before it, else the first; None without any."""
    for path in reversed(segment_paths(folder)):
        for entry in reversed([entry for entry in index_segment(path) if entry.wall <= wall_time]):
            snapshot = read_logged(entry)
            if snapshot is not None:
                return snapshot
    snapshots = (read_logged(entry) for entry in logged_snapshots(folder))
    return next((snapshot for snapshot in snapshots if snapshot is not None), None)


def read_logged(entry: LoggedSnapshot) -> RunSnapshot | None:
    """Returns the snapshot at a position; None when it is damaged."""
    try:
        with entry.path.open("rb") as file:
            file.seek(entry.offset)
            content = file.read(entry.nbytes)
        length, crc, time_ms = _HEAD.unpack_from(content)
        payload = content[_HEAD.size :]
        if len(payload) != length or zlib.crc32(_MOMENT.pack(time_ms) + payload) != crc:
            return None
        # Bounded: a record from elsewhere may unpack to more than the memory
        unpacked = zlib.decompressobj().decompress(payload, _MAX_BYTES)
        return replace(run_store.decode_snapshot(unpacked), taken_wall=time_ms / 1000)
    except (OSError, struct.error, zlib.error, ZeromonError):
        return None


# ---- the record of one run on disk: the collector writes it, views of the past read it -----------

# ``<store>/runs/<run>/``: ``history/`` (every step), ``moments/`` (what the views showed), and
# ``findings.jsonl`` (when each finding came and went). When the disk refuses, writing stops and
# :attr:`Record.note` says why; the run goes on.

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
        self._steps: StepWriter | None = None
        self._moments: Writer | None = None
        try:
            self._fd = paths.open_private_folder(folder, run_store.DEPTH)
            self._folder = paths.path_by_descriptor(self._fd)
            self._steps = StepWriter(self._folder / _HISTORY)
            self._moments = Writer(self._folder / _MOMENTS)
        except _CANNOT as error:
            self._stop_writing(error)

    def _stop_writing(self, error: Exception) -> None:
        # The folder is written by its descriptor: /proc/self/fd/9 would tell the user nothing
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

    def keep(self, rows: Sequence[Row]) -> None:
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
        # A tick may come a little early: without the tenth, its snapshot would wait for the next
        interval = max(1.0, len(run.ranks) / _RANKS_A_SECOND) - 0.1
        try:
            self._note_findings(run)
            # Without abs(), a clock that is set back stops the log until it catches up
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
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            if file.tell() < _MAX_FINDINGS_BYTES:
                file.write(b"".join(_LINES.encode(finding) + b"\n" for finding in changed))


def replace_record(store: run_store.Store, run: RunSnapshot) -> None:
    """Replaces the record of the ended *run* by what *run* says; its rings stay.

    Raises :class:`OSError`, and :class:`~zeromon.base.errors.RingError` for a record of another user.
    """
    with run_store.open_run_folder(store.folder(run.run)) as folder:
        for name in (_HISTORY, _MOMENTS):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / _FINDINGS).unlink(missing_ok=True)
    shift = round(run.taken_wall * 1e9) - run.taken_ns
    record = Record(store.folder(run.run))
    for rank in run.ranks:
        record.keep([row_of(rank.rank, step, shift) for step in rank.steps.recent])
    record.see(run)
    store.save(run)


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
        return span_of_log(self._folder / _MOMENTS)

    def snapshot_times(self) -> list[float]:
        """Returns the times of all snapshots, seconds since the epoch."""
        return [entry.wall for entry in logged_snapshots(self._folder / _MOMENTS)]

    def at(self, wall_time: float) -> RunSnapshot:
        """Returns the snapshot at *wall_time* or the last before it; raises :class:`RunNotFound`."""
        snapshot = snapshot_at_time(self._folder / _MOMENTS, wall_time)
        if snapshot is None:
            raise RunNotFound(
                "nothing was kept of how this run was before",
                "It ended too soon, or its record is of an older zeromon.",
            )
        shift = round(snapshot.taken_wall * 1e9) - snapshot.taken_ns
        steps = last_steps_before(
            self._folder / _HISTORY, round(snapshot.taken_wall * 1e6), RECENT_STEPS
        )
        ranks = [
            rank.with_recent(step_of(row, shift) for row in steps.get(rank.rank, ()))
            for rank in snapshot.ranks
        ]
        return replace(snapshot, run=self._folder.name, ranks=tuple(ranks))

    def series(self, query: run_store.StepQuery = run_store.WHOLE_RUN) -> Series:
        """The steps that *query* selects: ``series_of_steps`` of step_history."""
        return series_of_steps(self._folder / _HISTORY, query)

    def lanes(self, steps: int, ranks: Sequence[int] = ()) -> Lanes:
        """The last *steps* steps as spans, from the rings on this node and those in the record."""
        rings = [*slices.run_events(self._folder.name, self._folder, steps + LAG_STEPS)]
        return lanes_of_rings(rings, node_clock_shifts(rings), steps=steps, ranks=ranks)

    def findings(self) -> list[Finding]:
        """See :func:`findings_of_record`."""
        return findings_of_record(self._folder)
