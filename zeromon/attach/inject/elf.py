"""Loaded objects of a process: shared libraries, their exported symbols, the padding behind their code.

All data comes from the memory of the process, so containers, deleted files and stripped files make no
difference. 64-bit little-endian ELF; any architecture. Nothing here stops or
changes the process.
"""

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

Read = Callable[[int, int], bytes]
"""``read(address, length)`` of the process's memory."""

_PAGE = 4096
_LOAD, _DYNAMIC = 1, 2
_EXECUTABLE = 1
_STRTAB, _SYMTAB, _GNU_HASH = 5, 6, 0x6FFFFEF5
_LONGEST_NAME = 64


class Mapping(NamedTuple):
    """A line of ``/proc/PID/maps``."""

    start: int
    end: int
    mode: str
    offset: int
    path: str


def read_mappings(pid: int, proc: Path = Path("/proc")) -> list[Mapping]:
    """All mappings of a process; raises OSError."""
    maps = []
    for row in (proc / str(pid) / "maps").read_text(errors="replace").splitlines():
        span, mode, offset, _, _, *path = row.split(None, 5)
        start, _, stop = span.partition("-")
        maps.append(
            Mapping(int(start, 16), int(stop, 16), mode, int(offset, 16), path[0] if path else "")
        )
    return maps


@dataclass(frozen=True, slots=True)
class Image:
    """An ELF object in memory. *base* is added to the addresses in its headers."""

    path: str
    base: int
    segments: tuple[tuple[int, int, int, int], ...]
    """(type, flags, address, size in the file) of the program headers."""

    def padding(self) -> tuple[int, int]:
        """(address, length) of the padding between the end of its code and the end of that page."""
        largest = (0, 0)
        for kind, flags, address, size in self.segments:
            code_end = self.base + address + size
            if kind == _LOAD and flags & _EXECUTABLE and -code_end % _PAGE > largest[1]:
                largest = (code_end, -code_end % _PAGE)
        return largest

    def symbols(self, names: tuple[str, ...], read_memory: Read) -> dict[str, int]:
        """Addresses of those of *names* that the object exports."""
        table = next((s for s in self.segments if s[0] == _DYNAMIC), None)
        if table is None:
            return {}
        raw = read_memory(self.base + table[2], table[3] & ~15)
        dynamic = dict(struct.iter_unpack("<QQ", raw))
        if not {_STRTAB, _SYMTAB, _GNU_HASH} <= dynamic.keys():
            return {}
        # the loader relocates these in place, except where the section is read-only
        at = {
            tag: dynamic[tag] if dynamic[tag] >= self.base else dynamic[tag] + self.base
            for tag in (_STRTAB, _SYMTAB, _GNU_HASH)
        }
        addresses = {}
        for name in names:
            address = self._look_up(name.encode(), at, read_memory)
            if address:
                addresses[name] = address
        return addresses

    def _look_up(self, name: bytes, at: dict[int, int], read_memory: Read) -> int:
        """The address of one symbol through the GNU hash table, or 0."""
        table = at[_GNU_HASH]
        buckets, first_index, bloom, _ = struct.unpack("<IIII", read_memory(table, 16))
        if not buckets:
            return 0
        wanted_hash = gnu_hash(name)
        bucket_at = table + 16 + 8 * bloom
        (index,) = struct.unpack("<I", read_memory(bucket_at + 4 * (wanted_hash % buckets), 4))
        while index >= first_index:
            (link,) = struct.unpack(
                "<I", read_memory(bucket_at + 4 * (buckets + index - first_index), 4)
            )
            # The lowest bit of an entry ends its chain and is no part of the hash
            if link | 1 == wanted_hash | 1:
                name_at, _, _, section, value = struct.unpack(
                    "<IBBHQ", read_memory(at[_SYMTAB] + 24 * index, 16)
                )
                spelt = read_memory(at[_STRTAB] + name_at, _LONGEST_NAME).partition(b"\0")[0]
                # Section 0 is a symbol that the object imports and does not define
                if spelt == name and section and value:
                    return self.base + int(value)
            if link & 1:
                return 0
            index += 1
        return 0


def gnu_hash(name: bytes) -> int:
    """The GNU hash of a symbol name."""
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


def elf_images(maps: list[Mapping], read_memory: Read) -> Iterator[Image]:
    """The ELF objects among the mappings."""
    for mapping in maps:
        if mapping.offset or not mapping.path.startswith("/") or "r" not in mapping.mode:
            continue
        with suppress(OSError):  # unmapped meanwhile, or a truncated file
            head = read_memory(mapping.start, 64)
            if head[:6] == b"\x7fELF\x02\x01":
                yield _elf_image(mapping, head, read_memory)


def _elf_image(mapping: Mapping, head: bytes, read_memory: Read) -> Image:
    (table,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    raw = read_memory(mapping.start + table, size * count)
    segments = []
    for number in range(count):
        kind, flags, _, address, _, nbytes = struct.unpack_from("<IIQQQQ", raw, number * size)
        segments.append((kind, flags, address, nbytes))
    lowest = min((a for kind, _, a, _ in segments if kind == _LOAD), default=0)
    # An executable without PIE is linked at its address: its base is 0
    return Image(mapping.path, mapping.start - (lowest & -_PAGE), tuple(segments))


# ---- the process in which the injection runs a line, and the addresses that this needs ----------

THREAD_NAME = "zeromon-inject"
"""The name of an injected thread until it ends."""


class Target(NamedTuple):
    """A process, and the addresses that an injection needs."""

    pid: int
    symbols: dict[str, int]
    padding: int
    """Address of the padding for the code."""
    room: int
    """Length of the padding in bytes."""


def waits_for_interpreter(pid: int) -> bool:
    """Returns whether an injected thread still waits in process *pid* for the interpreter's lock."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                if (task / "comm").read_text().strip() == THREAD_NAME:
                    return True
    return False


def wait_until_true(question: Callable[[], bool], seconds: float) -> bool:
    """Waits up to *seconds* for *question* to become true; returns whether it did."""
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
