"""Reads the memory of the host as the kernel accounts it, from the collector.

The tightest memory cgroup of a process (v1 and v2) and the available memory of the kernel limit what the
process may still allocate. The counters of OOM kills are the evidence when a rank ends without a final
record.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zeromon.probes import process
from zeromon.snapshot.host import Disk, HostMemory

# cgroup v1 writes no limit as the largest multiple of a page below 2**63
_UNLIMITED = 1 << 60


class HostReader:
    """Reads once a round for all processes of one cgroup; *proc* and *cgroup* are for tests."""

    def __init__(self, proc: Path = process.PROC, cgroup: Path = process.CGROUP) -> None:
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
            # Kept: /proc/PID/cgroup is gone with the process, and its OOM kill is looked for then
            levels = self._levels[pid] = tuple(
                process.cgroup_folders(pid, "memory", self._proc, self._cgroup)
            )
        memory = self._now.get(levels)
        if memory is None:
            memory = self._now[levels] = self._read(levels)
        return memory

    def resident_bytes(self, pid: int) -> int:
        """Returns the resident set of *pid* now, bytes; 0 once it has given its memory back."""
        return max(0, _read_field(self._proc / str(pid) / "status", "VmRSS:")) * 1024

    def _read(self, levels: tuple[Path, ...]) -> HostMemory:
        # the innermost cgroup with a counter: outer cgroups include kills of other processes
        kills = next((n for n in map(count_oom_kills, levels) if n >= 0), -1)
        everywhere = _read_field(self._proc / "vmstat", "oom_kill")
        base_kills = self._first.setdefault(levels, (max(0, kills), max(0, everywhere)))
        tightest = min(
            (level for level in map(read_cgroup_memory, levels) if level is not None),
            key=lambda level: level.headroom_bytes,
            default=HostMemory(),
        )
        kib = _read_field(self._proc / "meminfo", "MemAvailable:")
        available = kib * 1024 if kib >= 0 else -1
        headroom = tightest.headroom_bytes if tightest.limit_bytes > 0 else available
        return replace(
            tightest,
            headroom_bytes=min(headroom, available) if available >= 0 else headroom,
            oom_kills=kills - base_kills[0] if kills >= 0 else -1,
            oom_kills_everywhere=max(0, everywhere - base_kills[1]),
        )


def memory_capacity(pid: int, proc: Path = process.PROC, cgroup: Path = process.CGROUP) -> int:
    """Returns the bytes of *pid*'s machine, or the limit of its tightest cgroup; -1 where unknown."""
    total = _read_field(proc / "meminfo", "MemTotal:")
    levels = map(read_cgroup_memory, process.cgroup_folders(pid, "memory", proc, cgroup))
    limits = [level.limit_bytes for level in levels if level is not None]
    return min([*limits, *([total * 1024] if total >= 0 else [])], default=-1)


def read_cgroup_memory(folder: Path) -> HostMemory | None:
    """Returns the memory of one cgroup; None for a cgroup without a limit."""
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        # In v1 the usage includes child cgroups, and only the fields with total_ do
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit = _read_number(folder / limit_name)
        if not 0 < limit < _UNLIMITED:
            continue
        usage = _read_number(folder / usage_name)
        # the kernel reclaims the page cache before it kills a process
        reclaimable = sum(
            max(0, _read_field(folder / "memory.stat", f"{prefix}{name}"))
            for name in ("inactive_file", "active_file")
        )
        return HostMemory(
            cgroup=str(folder),
            limit_bytes=limit,
            usage_bytes=usage,
            headroom_bytes=max(0, limit - max(0, usage - reclaimable)),
        )
    return None


def count_oom_kills(folder: Path) -> int:
    """Returns how many processes of the cgroup the OOM killer ended; -1 without a counter."""
    kills = _read_field(folder / "memory.events", "oom_kill")
    return kills if kills >= 0 else _read_field(folder / "memory.oom_control", "oom_kill")


def _read_number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(process.read_small_file(path))
    return -1


def _read_field(path: Path, name: str) -> int:
    """The number behind *name* in a file of "name number" lines, or -1."""
    with suppress(ValueError):
        for fields in process.read_word_lines(path):
            if len(fields) >= 2 and fields[0] == name:
                return int(fields[1])
    return -1


# ---- the host memory of a process and everything that it starts ---------------------------------

_LOOK_FOR_CHILDREN_SECONDS = 0.2
_STATUS_FIELDS = ("VmHWM:", "RssAnon:", "RssFile:", "RssShmem:")


class Footprint:
    """Follows the tree of *pid*, or that process alone where it is not *deep*.

    Pages of files do not count: the kernel takes them back first.
    """

    def __init__(self, pid: int, proc: Path = process.PROC, *, deep: bool = True) -> None:
        self.pid, self._deep = pid, deep
        self._proc = proc
        self._pids: set[int] = {pid}
        self._looked = 0.0
        self._most: dict[int, int] = {}
        """Pid -> bytes at its peak, also of those that have ended."""
        self._high: dict[int, tuple[int, int]] = {}
        """Pid -> the high-water mark of all its pages, and those of files, at the last look."""
        self._living: set[int] = set()
        self._reader = HostReader(proc)

    def read(self) -> int:
        """Returns the bytes of all processes now."""
        self._add_children()
        total = 0
        self._living = set()
        for pid in self._pids:
            rows = process.read_word_lines(self._proc / str(pid) / "status")
            fields = {row[0]: int(row[1]) * 1024 for row in rows if row[0] in _STATUS_FIELDS}
            if not fields:
                continue
            self._living.add(pid)
            resident = fields.get("RssAnon:", 0) + fields.get("RssShmem:", 0)
            high, files = fields.get("VmHWM:", 0), fields.get("RssFile:", 0)
            last_high, last_files = self._high.get(pid, (0, 0))
            # where memory ends the kernel takes files back: they are most when the peak begins
            peak = high - max(files, last_files) if high > last_high else 0
            self._most[pid] = max(self._most.get(pid, 0), resident, peak)
            self._high[pid] = high, files
            total += resident
        return total

    def peak(self) -> int:
        """Returns the sum of the peaks of the living processes: ranks peak together."""
        return sum(self._most.get(pid, 0) for pid in self._living)

    def headroom(self, spare_bytes: int = 0) -> tuple[int, int]:
        """Returns the bytes that can still be taken, and the OOM kills that the cgroup counted.

        *spare_bytes* are left to other processes, where no cgroup limits these.
        """
        self._reader.new_round()
        memory = self._reader.read(self.pid)
        is_shared = memory.limit_bytes <= 0 <= memory.headroom_bytes
        spare = min(spare_bytes, memory.headroom_bytes) if is_shared else 0
        return memory.headroom_bytes - spare, memory.oom_kills

    def end(self, *, patience_seconds: float = 10.0) -> None:
        """Ends all processes by SIGTERM, and what remains by SIGKILL."""
        # Before the signals: the children of a process that has ended are found no more
        self._add_children(at_once=True)
        _send_signal(self._pids, signal.SIGTERM)
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline and self._is_alive():
            time.sleep(0.05)
        self.kill()

    def kill(self, *, all_but: Iterable[int] = ()) -> None:
        """Ends all processes by SIGKILL, at once, before they take more."""
        self._add_children(at_once=True)
        _send_signal(self._pids - set(all_but), signal.SIGKILL)

    def _is_alive(self) -> bool:
        # A zombie that its parent does not collect would be waited for until the deadline
        return any(process.process_state_letter(pid, self._proc) not in ("", "Z") for pid in self._pids)

    def _add_children(self, *, at_once: bool = False) -> None:
        """Adds the children of the known processes; a child keeps its place when its parent ends."""
        now_seconds = time.monotonic()
        if not self._deep:
            return
        if not at_once and now_seconds - self._looked < _LOOK_FOR_CHILDREN_SECONDS:
            return
        self._looked = now_seconds
        waiting = list(self._pids)
        while waiting:
            children = process.child_process_ids(waiting.pop(), self._proc) - self._pids
            self._pids |= children
            waiting += children
        self._pids = {pid for pid in self._pids if process.process_state_letter(pid, self._proc)}


def _send_signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


# ---- disks --------------------------------------------------------------------------------------

# Measures the disk that holds offloaded state, and a process's own I/O, from the collector.
# A disk does not report its bandwidth. The figures are the time with requests under way, the number
# of requests, the highest rate of this run, and the limits of the cgroup.

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

    def __init__(self, pid: int, proc: Path = process.PROC, cgroup: Path = process.CGROUP) -> None:
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
            for fields in process.read_word_lines(f"{self._proc}/{self._pid}/io"):
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
            self._folders = self._folders or process.cgroup_folders(
                self._pid, "blkio", self._proc, self._cgroup
            )
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
        for fields in process.read_word_lines(proc / "diskstats"):
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
        for fields in process.read_word_lines(folder / f"blkio.throttle.{name}_bps_device")
        if fields[0] == device and fields[1].isdigit()
    ]


def _cgroup_limits_v2(folder: Path, device: str) -> list[tuple[str, float]]:
    """Lines like ``8:16 rbps=2097152 wbps=max riops=max wiops=120``."""
    limit_names = {"rbps": _READS, "wbps": _WRITES}
    return [
        (limit_names[name], float(value))
        for fields in process.read_word_lines(folder / "io.max")
        if fields[0] == device
        for name, _, value in (setting.partition("=") for setting in fields[1:])
        if name in limit_names and value.isdigit()
    ]
