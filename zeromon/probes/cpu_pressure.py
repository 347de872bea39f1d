"""Measures how long a process waits for a CPU and for pages from disk. Reads ``/proc`` only."""

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

from zeromon.base.units import printable
from zeromon.probes.process import CGROUP, PROC, cgroup_folders, read_small_file, read_word_lines
from zeromon.snapshot.host import CpuUser, Pressure

_MAX_READINGS = 61
"""Readings, one a second."""
_MIN_SECONDS = 5.0
"""After so many seconds of steps a share of them is no chance."""
_HOLD_RATIO = 0.8
_WARM_UP = 5
"""Steps that the figure of all steps leaves out."""


class PressureReader:
    """Reads the waits of one process's main thread; *proc* and *cgroup* are for tests."""

    def __init__(self, pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._schedstat, self._stat = f"{proc}/{pid}/schedstat", f"{proc}/{pid}/stat"
        self._readings: deque[tuple[int, int, int]] = deque(maxlen=_MAX_READINGS)
        """(time ns, ns on a run queue, major faults) of each reading since the first step."""
        self._held = 0.0
        self._cpus = usable_cpu_count(pid, proc, cgroup)
        self._steps = 0
        self._waited_ns = self._stepped_ns = 0
        """On a run queue, and in all, between readings with steps in between."""

    def read(self, now_ns: int, steps: int, since_ns: int) -> Pressure | None:
        """Returns the means since *since_ns*; None without ``/proc`` and before the steps.

        *steps*: those that the process has taken. Start-up and warm-up are left out.
        """
        with suppress(OSError, ValueError, IndexError):
            waited = int(read_small_file(self._schedstat).split()[1])
            # the name in parentheses may contain spaces
            fields = read_small_file(self._stat).rpartition(")")[2].split()
            if self._readings and steps > self._steps >= _WARM_UP:
                self._waited_ns += waited - self._readings[-1][1]
                self._stepped_ns += now_ns - self._readings[-1][0]
            if not self._steps:
                self._readings.clear()
            self._steps = steps
            self._readings.append((now_ns, waited, int(fields[9])))
        if len(self._readings) < 2:
            return None
        since_ns = min(since_ns, now_ns - round(_MIN_SECONDS * 1e9))
        base = next(r for r in reversed(self._readings) if r[0] <= since_ns or r is self._readings[0])
        cpu_wait, faults = self._since(base)
        is_settled = now_ns - self._readings[0][0] >= _MIN_SECONDS * 1e9
        minute = self._since(self._readings[0])[0] if is_settled else 0.0
        # Held within a band: a share that wanders about a threshold would make its finding come and go
        if not _HOLD_RATIO * self._held <= minute <= self._held:
            self._held = minute
        return Pressure(
            cpu_wait_ratio=cpu_wait,
            major_faults_per_second=faults,
            minute_cpu_wait_ratio=minute,
            held_cpu_wait_ratio=self._held,
            cpus=self._cpus,
            steps_cpu_wait_ratio=self._waited_ns / self._stepped_ns if self._stepped_ns else None,
        )

    def _since(self, base: tuple[int, int, int]) -> tuple[float, float]:
        """Returns the share of the time without a CPU, and major faults per second."""
        end_ns, waited, faults = self._readings[-1]
        span_ns = max(1, end_ns - base[0])
        return max(0.0, (waited - base[1]) / span_ns), max(0, faults - base[2]) / span_ns * 1e9


def usable_cpu_count(pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> float | None:
    """Returns the CPUs that *pid* may use: the least of affinity and cgroup quotas; None if unknown."""
    limits: list[float] = []
    with suppress(OSError):
        limits.append(len(os.sched_getaffinity(pid)))
    for folder in cgroup_folders(pid, "cpu", proc, cgroup):
        quota = [*_first_words(folder / "cpu.max"), *_first_words(folder / "cpu.cfs_quota_us")]
        period = [*quota[1:], *_first_words(folder / "cpu.cfs_period_us")]
        # No limit is max in version 2 of cgroups, and -1 in version 1
        if quota and period and quota[0].isdigit() and period[0].isdigit():
            limits.append(int(quota[0]) / max(1, int(period[0])))
    return min(limits, default=None)


def _first_words(file: Path) -> list[str]:
    return next(iter(read_word_lines(file)), [])


# ---- finds the processes of this node that use most CPU time ------------------------------------

_MAX_USERS = 8
_MIN_CPUS = 0.05
_MAX_NAME_CHARS = 60
_INTERVAL_NS = 5_000_000_000
"""Between two readings of all processes, which cost some milliseconds."""
_MAX_GAP_NS = 3 * _INTERVAL_NS


class CpuUsers:
    """Compares the CPU time of all processes over some seconds; *proc* is for tests."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._spent: dict[int, int] = {}
        self._read_ns = 0
        self._users: tuple[CpuUser, ...] = ()

    def read(self, now_ns: int) -> tuple[CpuUser, ...]:
        """Returns the largest users between the last two readings, the largest first."""
        if now_ns - self._read_ns < _INTERVAL_NS:
            return self._users
        ticks_by_pid, parents = self._all_cpu_ticks()
        if now_ns - self._read_ns > _MAX_GAP_NS:  # nobody asked meanwhile
            self._spent = {}
        ticks = (now_ns - self._read_ns) / 1e9 * os.sysconf("SC_CLK_TCK")
        common_pids = ticks_by_pid.keys() & self._spent.keys()
        used = {pid: (ticks_by_pid[pid] - self._spent[pid]) / ticks for pid in common_pids}
        busiest = sorted((pid for pid in used if used[pid] >= _MIN_CPUS), key=lambda pid: -used[pid])
        self._users = tuple(
            CpuUser(pid=pid, name=self._name(pid), cpus=used[pid], parent=parents[pid])
            for pid in busiest[:_MAX_USERS]
        )
        self._spent, self._read_ns = ticks_by_pid, now_ns
        return self._users

    def _all_cpu_ticks(self) -> tuple[dict[int, int], dict[int, int]]:
        """Returns pid -> clock ticks of CPU time, and pid -> pid of the parent."""
        ticks_by_pid: dict[int, int] = {}
        parents: dict[int, int] = {}
        for name in (folder.name for folder in self._proc.iterdir()):
            if name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    fields = read_small_file(f"{self._proc}/{name}/stat").rpartition(")")[2].split()
                    ticks_by_pid[int(name)] = int(fields[11]) + int(fields[12])
                    parents[int(name)] = int(fields[1])
        return ticks_by_pid, parents

    def _name(self, pid: int) -> str:
        """The program and its first argument that is no option, in one line: ``python train.py``."""
        with suppress(OSError):
            argv = read_small_file(f"{self._proc}/{pid}/cmdline").split("\0")
            named = [at for at, arg in enumerate(argv) if arg and not arg.startswith("-")][:2]
            # After -c stands a program, which is no path and may have many lines
            is_code = len(named) == 2 and argv[named[1] - 1] == "-c"
            name_words = [Path(argv[at]).name for at in (named[:1] if is_code else named)]
            name_words += ["-c", *argv[named[1]].split()] if is_code else []
            if name_words:
                return printable(" ".join(" ".join(name_words).split())[:_MAX_NAME_CHARS])
        return "a process"
