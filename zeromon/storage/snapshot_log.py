"""The log of a run's snapshots: appended, never changed, thinned when it grows too large.

``<run>/moments/`` holds numbered segments of compressed snapshots with a checksum each; what was written
outlives its writer. When all segments take more than a limit, the two oldest of those that were thinned
least become one, with every second snapshot of both. The newest snapshots are about a second apart, the
older ones ever further.

A snapshot is logged without its last steps: :mod:`zeromon.storage.step_history` has them.
"""

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from zeromon.base.errors import HistoryError, ZeromonError, os_errors_as
from zeromon.ring import paths
from zeromon.ring.files import replacing_file
from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import decode_snapshot, encode_snapshot

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
    return replace(run, ranks=tuple(replace(rank, recent=()) for rank in run.ranks))


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
            self._resume_log()

    def _resume_log(self) -> None:
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
        blob = _pack_record(time_ms, zlib.compress(encode_snapshot(without_recent_steps(run)), 6))
        with os_errors_as(HistoryError, f"write {self.folder}"):
            nbytes = os.write(self._fd, blob)
            if nbytes < len(blob):
                raise HistoryError(f"cannot write {self.folder}: no space left")
            self._last_ms = time_ms
            self._count += 1
            if self._count >= self._segment_moments:
                os.close(self._fd)
                self._number += 1
                self._open_segment()
                thin_oldest_segments(self.folder, self._limit)

    def close(self) -> None:
        """Closes the segment."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _pack_record(time_ms: int, payload: bytes) -> bytes:
    crc = zlib.crc32(_MOMENT.pack(time_ms) + payload)
    return _HEAD.pack(len(payload), crc, time_ms) + payload


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
    """Returns the numbers of the first and the last segment that *path* replaces."""
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
        while (
            files and _segment_numbers(files[-1])[0] >= first_number
        ):  # names sort by first, then last: a wider one
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
        unpacked = zlib.decompressobj().decompress(payload, _MAX_BYTES)
        return replace(decode_snapshot(unpacked), taken_wall=time_ms / 1000)
    except (OSError, struct.error, zlib.error, ZeromonError):
        return None
