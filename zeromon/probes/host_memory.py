"""Reads the memory of the host as the kernel accounts it, from the collector.

The tightest memory cgroup of a process (v1 and v2) and the available memory of the kernel limit what the
process may still allocate. The counters of OOM kills are the evidence when a rank ends without a final
record.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zeromon.probes.cgroups import CGROUP, PROC, folders, lines_of, text_of
from zeromon.snapshot import HostMemory

_UNLIMITED = 1 << 60


class HostReader:
    """Reads once a round for all processes of one cgroup; *proc* and *cgroup* are for tests."""

    def __init__(self, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._proc = proc
        self._cgroup = cgroup
        self._levels: dict[int, tuple[Path, ...]] = {}
        self._first: dict[tuple[Path, ...], tuple[int, int]] = {}
        """Cgroup folders -> OOM kills at the first reading: of the cgroup, of the whole kernel."""
        self._now: dict[tuple[Path, ...], HostMemory] = {}

    def new_round(self) -> None:
        """Discards all readings: the next :meth:`read` reads the files again."""
        self._now.clear()

    def read(self, pid: int) -> HostMemory:
        """Returns the memory available to *pid*; after its death only if an earlier call read it."""
        levels = self._levels.get(pid)
        if levels is None:
            levels = self._levels[pid] = tuple(folders(pid, "memory", self._proc, self._cgroup))
        memory = self._now.get(levels)
        if memory is None:
            memory = self._now[levels] = self._read(levels)
        return memory

    def _read(self, levels: tuple[Path, ...]) -> HostMemory:
        # the innermost cgroup with a counter: outer cgroups include kills of other processes
        kills = next((n for n in map(oom_kills, levels) if n >= 0), -1)
        everywhere = _field(self._proc / "vmstat", "oom_kill")
        first = self._first.setdefault(levels, (max(0, kills), max(0, everywhere)))
        tightest = min(
            (level for level in map(read_level, levels) if level is not None),
            key=lambda level: level.headroom_bytes,
            default=HostMemory(),
        )
        kib = _field(self._proc / "meminfo", "MemAvailable:")
        available = kib * 1024 if kib >= 0 else -1
        headroom = tightest.headroom_bytes if tightest.limit_bytes > 0 else available
        return replace(
            tightest,
            headroom_bytes=min(headroom, available) if available >= 0 else headroom,
            oom_kills=kills - first[0] if kills >= 0 else -1,
            oom_kills_everywhere=max(0, everywhere - first[1]),
        )


def capacity(pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Returns the bytes of *pid*'s machine, or the limit of its tightest cgroup; -1 where unknown."""
    total = _field(proc / "meminfo", "MemTotal:")
    levels = map(read_level, folders(pid, "memory", proc, cgroup))
    limits = [level.limit_bytes for level in levels if level is not None]
    return min([*limits, *([total * 1024] if total >= 0 else [])], default=-1)


def read_level(folder: Path) -> HostMemory | None:
    """Returns the memory of one cgroup; None for a cgroup without a limit."""
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit = _number(folder / limit_name)
        if not 0 < limit < _UNLIMITED:
            continue
        usage = _number(folder / usage_name)
        # the kernel reclaims the page cache before it kills a process
        reclaimable = sum(
            max(0, _field(folder / "memory.stat", f"{prefix}{name}"))
            for name in ("inactive_file", "active_file")
        )
        return HostMemory(
            cgroup=str(folder),
            limit_bytes=limit,
            usage_bytes=usage,
            headroom_bytes=max(0, limit - max(0, usage - reclaimable)),
        )
    return None


def oom_kills(folder: Path) -> int:
    """Returns how many processes of the cgroup the OOM killer ended; -1 without a counter."""
    kills = _field(folder / "memory.events", "oom_kill")
    return kills if kills >= 0 else _field(folder / "memory.oom_control", "oom_kill")


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(text_of(path))
    return -1


def _field(path: Path, name: str) -> int:
    """The number behind *name* in a file of "name number" lines, or -1."""
    with suppress(ValueError):
        for words in lines_of(path):
            if len(words) >= 2 and words[0] == name:
                return int(words[1])
    return -1
