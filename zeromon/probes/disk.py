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

from zeromon.probes.process import CGROUP, PROC, cgroup_folders, read_word_lines
from zeromon.snapshot.host import Disk

_SECTOR = 512  # the unit of /proc/diskstats, whatever the sector size of the device
_MAX_READINGS = 11
"""Number of readings, one a second: figures cover the last ten seconds."""
_MIN_BUSY_SECONDS = 0.5
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
        self._counters: deque[_Counters] = deque(maxlen=_MAX_READINGS)
        self._rate: float | None = None
        self._at_once: float | None = None
        self._best = 0.0
        self._folders: list[Path] = []
        """Its cgroups; the kernel does not list them once the process has ended."""

    def read(self, path: str, now_ns: int) -> Disk | None:
        """Returns the I/O of the process and of the disk at *path*; None if both are unknown."""
        names = {"read_bytes:": "process_read_bytes", "write_bytes:": "process_written_bytes"}
        facts: dict[str, Any] = {}
        with suppress(ValueError, IndexError):
            for fields in read_word_lines(f"{self._proc}/{self._pid}/io"):
                if fields[0] in names:
                    facts[names[fields[0]]] = int(fields[1])
        if not path:
            return Disk(**facts) if facts else None
        with suppress(OSError):
            space = os.statvfs(path)
            facts["free_bytes"] = space.f_bavail * space.f_frsize
            facts["total_bytes"] = space.f_blocks * space.f_frsize
            number = Path(path).stat().st_dev
            facts.update(_device_counters(number, self._proc))
            self._folders = self._folders or cgroup_folders(self._pid, "blkio", self._proc, self._cgroup)
            facts.update(cgroup_io_limits(self._folders, number))
        return self._with_device_rates(Disk(path=path, **facts), now_ns)

    def _with_device_rates(self, disk: Disk, now_ns: int) -> Disk:
        """Adds the rates of the device over the last readings to *disk*."""
        if disk.device_busy_seconds is None or disk.device_queue_seconds is None:
            return disk
        moved = (disk.device_read_bytes or 0) + (disk.device_written_bytes or 0)
        current = _Counters(now_ns / 1e9, moved, disk.device_busy_seconds, disk.device_queue_seconds)
        self._counters.append(current)
        base = self._counters[0]
        seconds, busy = current.seconds - base.seconds, current.busy_seconds - base.busy_seconds
        if seconds <= 0:
            return disk
        if busy >= _MIN_BUSY_SECONDS:
            self._rate = (current.moved_bytes - base.moved_bytes) / busy
            self._at_once = (current.queue_seconds - base.queue_seconds) / busy
            self._best = max(self._best, self._rate)
        return replace(
            disk,
            # The kernel counts whole milliseconds: a busy disk may exceed the time between two readings
            busy_ratio=min(1.0, max(0.0, busy / seconds)),
            requests_at_once=self._at_once,
            busy_bytes_per_second=self._rate,
            best_busy_bytes_per_second=self._best or None,
        )


def _device_counters(number: int, proc: Path) -> dict[str, Any]:
    """The counters of a block device; empty for a file system without a device (tmpfs, overlay)."""
    device_number = [str(os.major(number)), str(os.minor(number))]
    with suppress(ValueError, IndexError):
        for fields in read_word_lines(proc / "diskstats"):
            if fields[:2] == device_number:
                return {
                    "device": fields[2],
                    "device_read_bytes": int(fields[5]) * _SECTOR,
                    "device_written_bytes": int(fields[9]) * _SECTOR,
                    "device_busy_seconds": int(fields[12]) / 1e3,
                    "device_queue_seconds": int(fields[13]) / 1e3,
                }
    return {}


def cgroup_io_limits(cgroups: Iterable[Path], number: int) -> dict[str, float]:
    """Returns the lowest limits of *cgroups* for device *number*, bytes/s; {} without a limit."""
    device = f"{os.major(number)}:{os.minor(number)}"
    limits: dict[str, float] = {}
    for folder in cgroups:
        for limit_name, rate in (*_cgroup_limits_v1(folder, device), *_cgroup_limits_v2(folder, device)):
            limits[limit_name] = min(rate, limits.get(limit_name, rate))
    return limits


_READS, _WRITES = "read_limit_bytes_per_second", "write_limit_bytes_per_second"


def _cgroup_limits_v1(folder: Path, device: str) -> list[tuple[str, float]]:
    """Lines like ``8:16 1048576``."""
    return [
        (limit_name, float(fields[1]))
        for limit_name, name in ((_READS, "read"), (_WRITES, "write"))
        for fields in read_word_lines(folder / f"blkio.throttle.{name}_bps_device")
        if fields[0] == device and fields[1].isdigit()
    ]


def _cgroup_limits_v2(folder: Path, device: str) -> list[tuple[str, float]]:
    """Lines like ``8:16 rbps=2097152 wbps=max riops=max wiops=120``."""
    limit_names = {"rbps": _READS, "wbps": _WRITES}
    return [
        (limit_names[name], float(value))
        for fields in read_word_lines(folder / "io.max")
        if fields[0] == device
        for name, _, value in (setting.partition("=") for setting in fields[1:])
        if name in limit_names and value.isdigit()
    ]
