"""Pictures of a run over time: what its views showed, kept to be looked at again.

``<run>/moments/`` holds numbered segments of compressed pictures with a checksum each, appended and
never changed, so that what was written outlives its writer. When all take more than a limit, the two
oldest segments that were thinned least become one, with every second picture of them: the newest stay
a second or so apart, the older ones stand ever further from each other.

A picture is kept without its last steps: the history (:mod:`zeromon.history`) has those.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from zeromon import paths
from zeromon.errors import HistoryError, ZeromonError
from zeromon.snapshot import RunSnapshot
from zeromon.store import decode, encode

MAGIC = b"ZMMOMT\0\1"
SEGMENT_MOMENTS = 256
LIMIT_BYTES = 128 << 20
_HEAD = struct.Struct("<IIq")
"""Length of the compressed picture, CRC of its moment and itself, moment in milliseconds."""
_MOMENT = struct.Struct("<q")
_MOST_BYTES = 1 << 28
_KEPT_WHOLE = 3
_SUFFIX = ".moments"
_NAME = re.compile(r"[0-9]{7,}-[0-9]{7,}\.moments")


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a kept picture lies."""

    wall: float
    """Seconds since the epoch."""
    path: Path
    offset: int
    nbytes: int
    """Its head included."""


def light(run: RunSnapshot) -> RunSnapshot:
    """*run* without what the history keeps."""
    return replace(run, ranks=tuple(replace(rank, recent=()) for rank in run.ranks))


# ---- writing --------------------------------------------------------------------------------------


class Writer:
    """The one writer of a run's moments; raises :class:`HistoryError` when it cannot go on."""

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
        try:
            self._resume()
        except OSError as error:
            raise HistoryError(f"cannot write {folder}: {error.strerror}") from error

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
        """Keeps the picture *run*; one that is not newer than the last is kept right behind it."""
        moment = max(round(run.taken_wall * 1000), self._last_ms + 1)
        blob = _packed(moment, zlib.compress(encode(light(run)), 6))
        try:
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
        except OSError as error:
            raise HistoryError(f"cannot write {self.folder}: {error.strerror}") from error

    def close(self) -> None:
        """Nothing is left to be written: what was appended is kept."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _packed(moment: int, payload: bytes) -> bytes:
    crc = zlib.crc32(_MOMENT.pack(moment) + payload)
    return _HEAD.pack(len(payload), crc, moment) + payload


def shrink(folder: Path, limit_bytes: int) -> None:
    """Thins the oldest of the least thinned until all take less than *limit_bytes*."""
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
    """Every second moment of both in one segment that stands for both."""
    kept = [*index(first), *index(second)][::2]
    joined = first.with_name(_name(_numbers(first)[0], _numbers(second)[1]))
    temporary = joined.with_name(f".{joined.name}.{os.getpid()}")
    try:
        with open(temporary, "xb", opener=paths.private_opener) as file:
            file.write(MAGIC)
            for moment in kept:
                with moment.path.open("rb") as source:
                    source.seek(moment.offset)
                    file.write(source.read(moment.nbytes))
        temporary.replace(joined)
    finally:
        temporary.unlink(missing_ok=True)
    for path in (first, second):  # no longer read: what stands for them is there
        path.unlink()


def _name(first: int, last: int) -> str:
    return f"{first:07}-{last:07}{_SUFFIX}"


def _numbers(path: Path) -> tuple[int, int]:
    """The first and the last of the segments that *path* stands for."""
    first, last = path.stem.split("-")
    return int(first), int(last)


def _width(path: Path) -> int:
    """One moment in so many is left of what was kept."""
    first, last = _numbers(path)
    return last - first + 1


# ---- reading --------------------------------------------------------------------------------------


def segments(folder: Path) -> list[Path]:
    """All segments in the order of time, without those that another one stands for."""
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


def index(path: Path) -> Iterator[Moment]:
    """The moments of a segment, up to the first that is not whole; the pictures are not read."""
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
            yield Moment(moment / 1000, path, at, _HEAD.size + length)
            file.seek(end)
            at = end


def moments(folder: Path) -> Iterator[Moment]:
    """All moments in the order of time."""
    for path in segments(folder):
        yield from index(path)


def newest(folder: Path) -> Moment | None:
    """The last moment that is kept."""
    for path in reversed(segments(folder)):
        kept = list(index(path))
        if kept:
            return kept[-1]
    return None


def span(folder: Path) -> tuple[float, float] | None:
    """The first moment and the last one, seconds since the epoch; None without any."""
    first, last = next(moments(folder), None), newest(folder)
    return None if first is None or last is None else (first.wall, last.wall)


def at(folder: Path, wall: float) -> RunSnapshot | None:
    """The picture at *wall*, or nearest before it, or the first; None where none can be read."""
    for path in reversed(segments(folder)):
        for moment in reversed([moment for moment in index(path) if moment.wall <= wall]):
            picture = read(moment)
            if picture is not None:
                return picture
    first = (read(moment) for moment in moments(folder))
    return next((picture for picture in first if picture is not None), None)


def read(moment: Moment) -> RunSnapshot | None:
    """The picture, or None when it is not what was written."""
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
