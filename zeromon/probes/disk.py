"""Measures the disk that holds offloaded state, and a process's own I/O, from the collector.

A disk does not report its bandwidth. The figures are the time with requests under way, the number of
requests, the highest rate of this run, and the limits of the cgroup.
"""

import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zeromon.probes.cgroups import CGROUP, PROC, folders, lines_of
from zeromon.snapshot import Disk

_SECTOR = 512  # the unit of /proc/diskstats, whatever the sector size of the device
_KEPT = 11
"""Number of readings, one a second: figures cover the last ten seconds."""
_LEAST_BUSY_SECONDS = 0.5
"""Below this a rate is not meaningful."""


class _Counters(NamedTuple):
    seconds: float
    moved_bytes: int
    busy_seconds: float
    queue_seconds: float


class DiskReader:
    """Reads the I/O of one process; *proc* and *cgroup* are for tests."""

    def __init__(self, pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._pid = pid
        self._proc = proc
        self._cgroup = cgroup
        self._counters: deque[_Counters] = deque(maxlen=_KEPT)
        self._rate: float | None = None
        self._at_once: float | None = None
        self._best = 0.0
        self._folders: list[Path] = []
        """Its cgroups; the kernel does not list them once the process has ended."""

    def read(self, path: str, now_ns: int) -> Disk | None:
        """Returns the I/O of the process and of the disk at *path*; None if both are unknown."""
        facts: dict[str, Any] = {**_process_io(self._pid, self._proc)}
        if not path:
            return Disk(**facts) if facts else None
        with suppress(OSError):
            space = os.statvfs(path)
            facts["free_bytes"] = space.f_bavail * space.f_frsize
            facts["total_bytes"] = space.f_blocks * space.f_frsize
            number = Path(path).stat().st_dev
            facts.update(_device(number, self._proc))
            self._folders = self._folders or folders(self._pid, "blkio", self._proc, self._cgroup)
            facts.update(io_limits(self._folders, number))
        return self._with_rates(Disk(path=path, **facts), now_ns)

    def _with_rates(self, disk: Disk, now_ns: int) -> Disk:
        """Adds the rates of the device over the last readings to *disk*."""
        if disk.device_busy_seconds is None or disk.device_queue_seconds is None:
            return disk
        moved = (disk.device_read_bytes or 0) + (disk.device_written_bytes or 0)
        now = _Counters(now_ns / 1e9, moved, disk.device_busy_seconds, disk.device_queue_seconds)
        self._counters.append(now)
        first = self._counters[0]
        spent, busy = now.seconds - first.seconds, now.busy_seconds - first.busy_seconds
        if spent <= 0:
            return disk
        if busy >= _LEAST_BUSY_SECONDS:
            self._rate = (now.moved_bytes - first.moved_bytes) / busy
            self._at_once = (now.queue_seconds - first.queue_seconds) / busy
            self._best = max(self._best, self._rate)
        return replace(
            disk,
            busy_ratio=min(1.0, max(0.0, busy / spent)),
            requests_at_once=self._at_once,
            busy_bytes_per_second=self._rate,
            best_busy_bytes_per_second=self._best or None,
        )


def _process_io(pid: int, proc: Path) -> dict[str, int]:
    """Returns the bytes that the process read from and wrote to storage."""
    names = {"read_bytes:": "process_read_bytes", "write_bytes:": "process_written_bytes"}
    moved: dict[str, int] = {}
    with suppress(ValueError, IndexError):
        for words in lines_of(f"{proc}/{pid}/io"):
            if words[0] in names:
                moved[names[words[0]]] = int(words[1])
    return moved


def _device(number: int, proc: Path) -> dict[str, Any]:
    """The counters of a block device; empty for a file system without a device (tmpfs, overlay)."""
    wanted = [str(os.major(number)), str(os.minor(number))]
    with suppress(ValueError, IndexError):
        for words in lines_of(proc / "diskstats"):
            if words[:2] == wanted:
                return {
                    "device": words[2],
                    "device_read_bytes": int(words[5]) * _SECTOR,
                    "device_written_bytes": int(words[9]) * _SECTOR,
                    "device_busy_seconds": int(words[12]) / 1e3,
                    "device_queue_seconds": int(words[13]) / 1e3,
                }
    return {}


def io_limits(cgroups: Iterable[Path], number: int) -> dict[str, float]:
    """Returns the lowest limits of *cgroups* for device *number*, bytes/s; {} without a limit."""
    device = f"{os.major(number)}:{os.minor(number)}"
    limits: dict[str, float] = {}
    for folder in cgroups:
        for way, rate in (*_limits_v1(folder, device), *_limits_v2(folder, device)):
            limits[way] = min(rate, limits.get(way, rate))
    return limits


_READS, _WRITES = "read_limit_bytes_per_second", "write_limit_bytes_per_second"


def _limits_v1(folder: Path, device: str) -> list[tuple[str, float]]:
    """Lines like ``8:16 1048576``."""
    return [
        (way, float(words[1]))
        for way, name in ((_READS, "read"), (_WRITES, "write"))
        for words in lines_of(folder / f"blkio.throttle.{name}_bps_device")
        if words[0] == device and words[1].isdigit()
    ]


def _limits_v2(folder: Path, device: str) -> list[tuple[str, float]]:
    """Lines like ``8:16 rbps=2097152 wbps=max riops=max wiops=120``."""
    ways = {"rbps": _READS, "wbps": _WRITES}
    return [
        (ways[name], float(value))
        for words in lines_of(folder / "io.max")
        if words[0] == device
        for name, _, value in (word.partition("=") for word in words[1:])
        if name in ways and value.isdigit()
    ]
