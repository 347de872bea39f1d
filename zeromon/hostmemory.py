"""The memory of the host as its kernel accounts it: read from outside, by the collector.

What a process may still take is decided by the tightest of its memory cgroups (v1 and v2) and by what
the kernel has available. The counters of OOM kills are the evidence when a rank ends without a word.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zeromon.cgroups import CGROUP, PROC, folders, lines_of
from zeromon.snapshot import HostMemory

_UNLIMITED = 1 << 60


class HostReader:
    """Reads once a round for all processes of one cgroup; *proc* and *cgroup* are for tests."""

    def __init__(self, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._proc = proc
        self._cgroup = cgroup
        self._levels: dict[int, tuple[Path, ...]] = {}
        self._first: dict[tuple[Path, ...], tuple[int, int]] = {}
        """OOM kills when a cgroup was first seen: of the cgroup, of the whole kernel."""
        self._now: dict[tuple[Path, ...], HostMemory] = {}

    def new_round(self) -> None:
        """What was read is old now."""
        self._now.clear()

    def read(self, pid: int) -> HostMemory:
        """The memory that *pid* lives in; also after its death, if it was asked for while it lived."""
        levels = self._levels.get(pid)
        if levels is None:
            levels = self._levels[pid] = tuple(folders(pid, "memory", self._proc, self._cgroup))
        found = self._now.get(levels)
        if found is None:
            found = self._now[levels] = self._read(levels)
        return found

    def _read(self, levels: tuple[Path, ...]) -> HostMemory:
        # the innermost that counts: what happens beside us in an outer one is not ours
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
    """What *pid*'s machine, or the tightest of its cgroups, has in all; -1 where nothing says."""
    total = _field(proc / "meminfo", "MemTotal:")
    levels = map(read_level, folders(pid, "memory", proc, cgroup))
    found = [level.limit_bytes for level in levels if level is not None]
    return min([*found, *([total * 1024] if total >= 0 else [])], default=-1)


def read_level(folder: Path) -> HostMemory | None:
    """One cgroup with a limit; None without one."""
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit = _number(folder / limit_name)
        if not 0 < limit < _UNLIMITED:
            continue
        usage = _number(folder / usage_name)
        # what the kernel gives back before it kills
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
    """Processes of this cgroup that the kernel killed for memory, -1 where it does not count them."""
    kills = _field(folder / "memory.events", "oom_kill")
    return kills if kills >= 0 else _field(folder / "memory.oom_control", "oom_kill")


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return -1


def _field(path: Path, name: str) -> int:
    """The number behind *name* in a file of "name number" lines, or -1."""
    with suppress(ValueError):
        for words in lines_of(path):
            if len(words) >= 2 and words[0] == name:
                return int(words[1])
    return -1
