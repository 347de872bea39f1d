"""The crash-surviving record: one ring a rank, one writer, any number of readers.

Layout (little-endian)::

    0     header: magic, version, record size, capacity, names size, pid, flags, rank, clocks
    256   bytes used in the name table (8 bytes, stored last)
    512   length and text of the path of the ring's file
    4096  name table: append-only entries of id, kind, length, CRC and a JSON text
    ...   `capacity` records of 64 bytes (see :mod:`zeromon.ring.events`), overwritten in turn

Where these bytes are, so that they outlive ``kill -9``: :mod:`zeromon.ring.ring_file`.

A reader proves each record whole. The writer stores the leading sequence number first and the
trailing one last (one ``pack_into``); the reader looks at the trailing one first, copies, and looks
at the leading one last. That needs stores and loads in program order, which x86-64 guarantees; on
other machines the writer adds a CRC, and the reader checks it.
The trailing number also tells a slot's age, so the reader needs no shared head counter.
"""

import itertools
import json
import os
import platform
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from zeromon.base.errors import RingError, RingVersionError, os_errors_as
from zeromon.ring import ring_file
from zeromon.ring.events import RECORD, RECORD_SIZE, Raw
from zeromon.ring.ring_file import HEADER_SIZE, MAGIC

VERSION = 1
CAPACITY = 1 << 16
NAMES_SIZE = 1 << 18
FLAG_CRC = 1

_HEADER = struct.Struct("<8sIIQQqIiQQ")
_NAMES_USED_AT = 256
_NAMES_USED = struct.Struct("<Q")
_NAME = struct.Struct("<HHII")
PACKED = struct.Struct("@nnIInnnnn").pack_into
"""Packs a RECORD in fewer words, in the native form of x86-64, which Python packs fastest."""
_BODY = struct.Struct("<QqIIqqqq")
_TAIL = struct.Struct("<II")
_CHUNK = 256
_MAX_TRIES = 3
_MAX_THREADS = 64
"""Max threads that write records at the same moment."""

WriteRecord = Callable[[int, int, int, int, int, int, int], None]
"""``write(t_ns, head, place, a, b, c, d)``; *head* and *place* as :mod:`zeromon.ring.events` packs
them."""


class Slots(NamedTuple):
    """The parts of :attr:`RingWriter.write`, for the hooks of each collective.

    They write two records a collective, and the call of ``write`` would cost as much as the record. *n*
    is the record's number, and the rest as ``write`` takes it::

        n = following()
        pack(records, (n & mask) * RECORD_SIZE, n, t_ns, head, place, a, b, c, d, n)
    """

    following: Callable[[], int]
    pack: Callable[..., None]
    records: memoryview
    mask: int


class NameKind:
    """The kind of object that a name-table entry describes."""

    META = 1
    GROUP = 2
    UNIT = 3
    TEXT = 4


class Name(NamedTuple):
    """An entry of the name table. *payload* is the decoded JSON object."""

    kind: int
    id: int
    payload: dict[str, Any]


class RingHeader(NamedTuple):
    """The header of a ring file."""

    capacity: int
    names_size: int
    pid: int
    flags: int
    rank: int
    wall_ns: int
    """CLOCK_REALTIME when the ring was made."""
    mono_ns: int
    """CLOCK_MONOTONIC at the same moment."""


def needs_record_crc() -> bool:
    """Returns True if this machine may reorder the stores of one record."""
    return platform.machine().lower() not in ("x86_64", "amd64")


def ring_file_size(capacity: int = CAPACITY, names_size: int = NAMES_SIZE) -> int:
    """Bytes of a ring file."""
    return HEADER_SIZE + names_size + capacity * RECORD_SIZE


class RingWriter:
    """The one writer of a ring. :attr:`write` is a closure, because a method call costs more.

    *pid*: of this process as its collector sees it, where that is not as it sees itself.
    *in_file*: the readers are in another IPC namespace.

    Raises :class:`RingError` when the ring cannot be made at its full size: a sparse file on a full
    tmpfs would end the training process with SIGBUS later.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        capacity: int = CAPACITY,
        names_size: int = NAMES_SIZE,
        crc: bool | None = None,
        pid: int = 0,
        in_file: bool = False,
    ) -> None:
        if capacity & (capacity - 1):
            raise ValueError(f"capacity must be a power of two, not {capacity}")
        self.path = path
        self.capacity = capacity
        self._names_size = names_size
        self._names_used = 0
        self._next_name = 1
        self._naming = threading.Lock()
        self._crc = needs_record_crc() if crc is None else crc
        self._map = self._create_ring(rank, pid or os.getpid(), in_file=in_file)
        self.muted: list[bool] = []  # filled when mute: its truth is the cheapest test there is
        self.slots = Slots(
            itertools.count(1).__next__,
            _pack_with_crc if self._crc else PACKED,
            self._map[HEADER_SIZE + names_size :],
            capacity - 1,
        )
        self.write: WriteRecord = self._make_write()

    def _create_ring(self, rank: int, pid: int, *, in_file: bool) -> memoryview:
        def write_header(ring: memoryview) -> None:
            flags = FLAG_CRC if self._crc else 0
            clocks = (time.time_ns(), time.monotonic_ns())
            head = (MAGIC, VERSION, RECORD_SIZE, self.capacity, self._names_size)
            _HEADER.pack_into(ring, 0, *head, pid, flags, rank, *clocks)

        size = ring_file_size(self.capacity, self._names_size)
        with os_errors_as(RingError, f"create {self.path}"):
            return ring_file.create_ring(self.path, size, write_header, in_file=in_file)

    def _make_write(self) -> WriteRecord:
        next_number, pack, records, mask = self.slots
        muted = self.muted

        def write(t: int, head: int, place: int, a: int, b: int, c: int, d: int) -> None:
            if muted:
                return
            n = next_number()
            pack(records, (n & mask) * RECORD_SIZE, n, t, head, place, a, b, c, d, n)

        return write

    def name(self, kind: int, payload: dict[str, Any]) -> int:
        """Adds an entry to the name table and returns its id; 0 when the table is full."""
        if self.muted:
            return 0
        json_bytes = json.dumps(payload, separators=(",", ":"), default=str).encode()
        with self._naming:
            # Asked again: close() may have released the memory while this thread waited
            return 0 if self.muted else self._append_name(kind, json_bytes)

    def _append_name(self, kind: int, json_bytes: bytes) -> int:
        end_offset = self._names_used + _NAME.size + len(json_bytes)
        # A record has 16 bits for the id of a name
        if end_offset > self._names_size or self._next_name > 0xFFFF:
            return 0
        number, self._next_name = self._next_name, self._next_name + 1
        at = HEADER_SIZE + self._names_used
        self._map[at + _NAME.size : at + _NAME.size + len(json_bytes)] = json_bytes
        _NAME.pack_into(self._map, at, number, kind, len(json_bytes), zlib.crc32(json_bytes))
        self._names_used = end_offset
        # Last: a reader takes the bytes before this offset for whole entries
        _NAMES_USED.pack_into(self._map, _NAMES_USED_AT, end_offset)
        return number

    def mute_writer(self) -> None:
        """Writes nothing from now on: for a forked child, which would collide with its parent."""
        self.muted.append(True)
        self.slots.records.release()  # hooks that write without :attr:`write` fail, and are caught

    def close(self) -> None:
        """Writes nothing from now on, and gives the memory back."""
        self.mute_writer()
        # Another thread may be writing a name into this memory
        with self._naming:
            self._map.release()


# fmt: off
def _pack_with_crc(records: memoryview, at: int, n: int, t: int, head: int, place: int,
              a: int, b: int, c: int, d: int, _: int) -> None:
    """Writes a record with its CRC, called as ``PACKED`` is."""
    record = _BODY.pack(n, t, head, place, a, b, c, d)
    records[at : at + 64] = record + _TAIL.pack(n & 0xFFFFFFFF, zlib.crc32(record))
# fmt: on


class RingReader:
    """Reads a ring, live or after its writer's death. :attr:`lost` counts records never seen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self.known = 1
        """Records before this number were seen by another reader, and are not lost."""
        self._next = 1
        self._names_read = 0
        self._hole = (0, 0)
        self._map, self._file = ring_file.open_ring_memory(path)
        self.header = self._read_header(len(self._map))
        start = HEADER_SIZE + self.header.names_size
        # memoryviews let one C call pick the sequence words of many records
        records = self._map[start : start + self.header.capacity * RECORD_SIZE]
        self._records, self._heads, self._tails = records, records.cast("Q"), records.cast("I")

    def _prove_mapped_size(self) -> None:
        """Raises :class:`RingError` where a mapped file was truncated: to read it would be SIGBUS."""
        if self._file is not None and self._file.size() < len(self._map):
            raise RingError(f"{self.path} was truncated to {self._file.size()} bytes")

    def _read_header(self, size: int) -> RingHeader:
        magic, version, record_size, capacity, names, pid, flags, rank, wall_ns, mono = (
            _HEADER.unpack_from(self._map, 0)
        )
        if magic != MAGIC:
            raise RingError(f"{self.path} is not a ring file")
        if version != VERSION or record_size != RECORD_SIZE:
            raise RingVersionError(
                f"{self.path} has layout version {version}, this zeromon reads {VERSION}"
            )
        if capacity < 1 or capacity & (capacity - 1) or size < ring_file_size(capacity, names):
            raise RingError(f"{self.path} is truncated: {size} bytes for {capacity} records")
        return RingHeader(capacity, names, pid, flags, rank, wall_ns, mono)

    def names(self) -> list[Name]:
        """The name-table entries added since the last call; stops at one that is not yet whole."""
        self._prove_mapped_size()
        entries: list[Name] = []
        (used,) = _NAMES_USED.unpack_from(self._map, _NAMES_USED_AT)
        # A damaged ring may hold any number here
        used = min(used, self.header.names_size)
        while self._names_read + _NAME.size <= used:
            at = HEADER_SIZE + self._names_read
            number, kind, size, crc = _NAME.unpack_from(self._map, at)
            json_bytes = bytes(self._map[at + _NAME.size : at + _NAME.size + size])
            if self._names_read + _NAME.size + size > used or zlib.crc32(json_bytes) != crc:
                break
            self._names_read += _NAME.size + size
            # json.loads() raises RecursionError where a damaged ring holds deeply nested brackets
            with suppress(ValueError, RecursionError):
                payload = json.loads(json_bytes)
                if isinstance(payload, dict):
                    entries.append(Name(kind, number, payload))
        return entries

    def newest(self) -> int:
        """The highest sequence number in the ring; one pass over it."""
        return max(self._heads[::8].tolist())

    def read(self, *, final: bool = False) -> list[Raw]:
        """All whole records since the last call, in order; *final* as for :meth:`records`."""
        return list(self.records(final=final))

    def records(self, *, final: bool = False) -> Iterator[Raw]:
        """Yields all whole records since the last call, in order; unpacks each when it is asked for.

        *final* says that the writer is dead: a record it never finished is stepped over at once
        instead of being waited for.
        """
        return itertools.chain.from_iterable(self._record_batches(final=final))

    def _record_batches(self, *, final: bool) -> Iterator[Iterable[Raw]]:
        self._prove_mapped_size()
        capacity = self.header.capacity
        while True:
            slot = self._next & (capacity - 1)
            expected = list(range(self._next, self._next + min(_CHUNK, capacity - slot)))
            whole_count = self._count_whole_records(slot, expected)
            if whole_count == len(expected):
                yield self._read_record_run(slot, expected)
                continue
            if whole_count:
                yield self._read_record_run(slot, expected[:whole_count])
            head = self._heads[(self._next & (capacity - 1)) * 8]
            if head > self._next:
                self._skip_lapped()
            elif not self._step_over_hole(final=final):
                return

    def _count_whole_records(self, slot: int, expected: list[int]) -> int:
        """How many of the *expected* records at *slot* the writer has finished, without a gap."""
        count = len(expected)
        tails = self._tails[slot * 16 + 14 : (slot + count) * 16 : 16].tolist()
        if tails == expected:
            return count
        pairs = enumerate(zip(tails, expected, strict=True))
        return next((i for i, (tail, n) in pairs if tail != n & 0xFFFFFFFF), count)

    def _read_record_run(self, slot: int, expected: list[int]) -> Iterable[Raw]:
        """Returns the whole ones of the *expected* records at *slot*; the next run begins after them."""
        first_number, count = self._next, len(expected)
        self._next += count
        # Copied before the leading numbers are read: a writer that overtakes the copy shows in them
        blob = bytes(self._records[slot * RECORD_SIZE : (slot + count) * RECORD_SIZE])
        heads = self._heads[slot * 8 : (slot + count) * 8 : 8].tolist()
        if heads == expected and not self.header.flags & FLAG_CRC:
            return RECORD.iter_unpack(blob)
        crc, proven = bool(self.header.flags & FLAG_CRC), []
        for i, raw in enumerate(RECORD.iter_unpack(blob)):
            body = blob[i * RECORD_SIZE : (i + 1) * RECORD_SIZE - _TAIL.size]
            if heads[i] == first_number + i == raw[0] and (not crc or zlib.crc32(body) == raw[7] >> 32):
                proven.append(raw)
            else:
                self._count_lost(first_number + i, first_number + i + 1)
        return proven

    def _skip_lapped(self) -> None:
        """The writer overtook us: go on a quarter of the ring ahead of where it writes."""
        capacity = self.header.capacity
        next_number = max(self._next + 1, self.newest() - capacity + 1 + capacity // 4)
        self._count_lost(self._next, next_number)
        self._next = next_number

    def _step_over_hole(self, *, final: bool) -> bool:
        """Passes a record that a thread began and has not finished; False when there is nothing."""
        if final:
            next_number = min((n for n in self._heads[::8].tolist() if n > self._next), default=0)
            self._count_lost(self._next, next_number)
            self._next = next_number or self._next
            return bool(next_number)
        # A thread that began one of the next records shows it; a live ring is not searched whole.
        mask, heads = self.header.capacity - 1, self._heads
        numbers = range(self._next + 1, self._next + 1 + _MAX_THREADS)
        if not any(heads[(n & mask) * 8] >= n for n in numbers):
            return False
        tries = self._hole[1] + 1 if self._hole[0] == self._next else 1
        self._hole = (self._next, tries)
        if tries <= _MAX_TRIES:
            return False
        self._count_lost(self._next, self._next + 1)
        self._next += 1
        return True

    def _count_lost(self, first_number: int, end_number: int) -> None:
        self.lost += max(0, end_number - max(first_number, self.known))

    @property
    def position(self) -> int:
        """The number of the record that comes next."""
        return self._next

    @property
    def memory(self) -> memoryview:
        """The whole ring, as a file of it would be."""
        self._prove_mapped_size()
        return self._map

    def close(self) -> None:
        """Gives the memory back."""
        for view in (self._tails, self._heads, self._records, self._map):
            view.release()
