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

from zeromon.errors import HistoryError, ZeromonError, os_errors_as
from zeromon.ring import paths
from zeromon.ring.files import replacing
from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import decode, encode

MAGIC = b"ZMMOMT\0\1"
SEGMENT_MOMENTS = 256
LIMIT_BYTES = 128 << 20
_HEAD = struct.Struct("<IIq")
"""Length of the compressed snapshot, CRC of its time and itself, time in milliseconds."""
_MOMENT = struct.Struct("<q")
_MOST_BYTES = 1 << 28
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


def without_steps(run: RunSnapshot) -> RunSnapshot:
    """Returns *run* without the steps that the history has."""
    return replace(run, ranks=tuple(replace(rank, recent=()) for rank in run.ranks))


# ---- writing --------------------------------------------------------------------------------------


class Writer:
    """Appends to the log in *folder*. Every method raises :class:`HistoryError` on a disk error."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_moments: int = SEGMENT_MOMENTS,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.folder = paths.make_private(folder)
        self._segment_moments = segment_moments
        self._limit = limit_bytes
        with os_errors_as(HistoryError, f"write {folder}"):
            self._resume()

    def _resume(self) -> None:
        found = segments(self.folder)
        for path in self.folder.iterdir():
            # half of a segment, or one that was thinned and not yet removed
            if path not in found and _SUFFIX in path.name:
                path.unlink(missing_ok=True)
        self._number = _numbers(found[-1])[1] if found else 1
        self._last_ms = round(last.wall * 1000) if (last := newest(self.folder)) else 0
        self._open()

    def _open(self) -> None:
        path = self.folder / _name(self._number, self._number)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        kept = list(index(path))
        self._count = len(kept)
        end = kept[-1].offset + kept[-1].nbytes if kept else 0
        os.ftruncate(self._fd, end)  # a torn end is cut off
        if not end:
            os.write(self._fd, MAGIC)

    def append(self, run: RunSnapshot) -> None:
        """Appends *run*. One that is not newer than the last gets a time right behind it."""
        moment = max(round(run.taken_wall * 1000), self._last_ms + 1)
        blob = _packed(moment, zlib.compress(encode(without_steps(run)), 6))
        with os_errors_as(HistoryError, f"write {self.folder}"):
            written = os.write(self._fd, blob)
            if written < len(blob):
                raise HistoryError(f"cannot write {self.folder}: no space left")
            self._last_ms = moment
            self._count += 1
            if self._count >= self._segment_moments:
                os.close(self._fd)
                self._number += 1
                self._open()
                shrink(self.folder, self._limit)

    def close(self) -> None:
        """Closes the segment."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _packed(moment: int, payload: bytes) -> bytes:
    crc = zlib.crc32(_MOMENT.pack(moment) + payload)
    return _HEAD.pack(len(payload), crc, moment) + payload


def shrink(folder: Path, limit_bytes: int) -> None:
    """Thins the oldest of the least thinned segments until all take at most *limit_bytes*."""
    while sum(path.stat().st_size for path in segments(folder)) > limit_bytes:
        older = segments(folder)[:-_KEPT_WHOLE]
        pairs = [(a, b) for a, b in pairwise(older) if _width(a) == _width(b)]
        if pairs:
            _join(*min(pairs, key=lambda pair: (_width(pair[0]), pair)))
        elif older:
            older[0].unlink()
        else:
            return


def _join(first: Path, second: Path) -> None:
    """Replaces two segments by one with every second snapshot of both."""
    kept = [*index(first), *index(second)][::2]
    joined = first.with_name(_name(_numbers(first)[0], _numbers(second)[1]))
    with replacing(joined) as temporary, temporary.open("wb") as file:
        file.write(MAGIC)
        for moment in kept:
            with moment.path.open("rb") as source:
                source.seek(moment.offset)
                file.write(source.read(moment.nbytes))
    for path in (first, second):  # no longer read: what stands for them is there
        path.unlink()


def _name(first: int, last: int) -> str:
    return f"{first:07}-{last:07}{_SUFFIX}"


def _numbers(path: Path) -> tuple[int, int]:
    """Returns the numbers of the first and the last segment that *path* replaces."""
    first, last = path.stem.split("-")
    return int(first), int(last)


def _width(path: Path) -> int:
    """Returns how many segments *path* replaces: one snapshot in so many is left."""
    first, last = _numbers(path)
    return last - first + 1


# ---- reading --------------------------------------------------------------------------------------


def segments(folder: Path) -> list[Path]:
    """Returns all segments in the order of time, without those that another one replaces."""
    found: list[Path] = []
    for path in sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.name):
        if not _NAME.fullmatch(path.name):
            continue
        first, last = _numbers(path)
        while (
            found and _numbers(found[-1])[0] >= first
        ):  # names sort by first, then last: a wider one
            found.pop()
        if not found or _numbers(found[-1])[1] < last:
            found.append(path)
    return found


def index(path: Path) -> Iterator[LoggedSnapshot]:
    """Yields the positions in a segment, up to the first broken one, without reading the snapshots."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(MAGIC)) != MAGIC:
            return
        at = len(MAGIC)
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, _, moment = _HEAD.unpack(head)
            end = at + _HEAD.size + length
            if length > _MOST_BYTES or end > size:
                return
            yield LoggedSnapshot(moment / 1000, path, at, _HEAD.size + length)
            file.seek(end)
            at = end


def moments(folder: Path) -> Iterator[LoggedSnapshot]:
    """Yields the positions of all snapshots in the order of time."""
    for path in segments(folder):
        yield from index(path)


def newest(folder: Path) -> LoggedSnapshot | None:
    """Returns the position of the last snapshot; None without any."""
    for path in reversed(segments(folder)):
        kept = list(index(path))
        if kept:
            return kept[-1]
    return None


def span(folder: Path) -> tuple[float, float] | None:
    """Returns the first and the last snapshot's time, seconds since the epoch; None without any."""
    first, last = next(moments(folder), None), newest(folder)
    return None if first is None or last is None else (first.wall, last.wall)


def at(folder: Path, wall: float) -> RunSnapshot | None:
    """Returns the snapshot at *wall*, else the last before it, else the first; None without any."""
    for path in reversed(segments(folder)):
        for moment in reversed([moment for moment in index(path) if moment.wall <= wall]):
            snapshot = read(moment)
            if snapshot is not None:
                return snapshot
    first = (read(moment) for moment in moments(folder))
    return next((snapshot for snapshot in first if snapshot is not None), None)


def read(moment: LoggedSnapshot) -> RunSnapshot | None:
    """Returns the snapshot at a position; None when it is damaged."""
    try:
        with moment.path.open("rb") as file:
            file.seek(moment.offset)
            content = file.read(moment.nbytes)
        length, crc, when = _HEAD.unpack_from(content)
        payload = content[_HEAD.size :]
        if len(payload) != length or zlib.crc32(_MOMENT.pack(when) + payload) != crc:
            return None
        unpacked = zlib.decompressobj().decompress(payload, _MOST_BYTES)
        return replace(decode(unpacked), taken_wall=when / 1000)
    except (OSError, struct.error, zlib.error, ZeromonError):
        return None
