"""Measures how long a process waits for a CPU and for pages from disk. Reads ``/proc`` only."""

import os
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zeromon.probes.cgroups import CGROUP, PROC, folders, lines_of, text_of
from zeromon.snapshot import Pressure

_KEPT = 11
"""Number of readings, one a second: figures cover the last ten seconds."""
_MINUTE = 60
_WARM_UP = 5
"""Steps that the figure of all steps leaves out."""


class PressureReader:
    """Reads the waits of one process's main thread; *proc* and *cgroup* are for tests."""

    def __init__(self, pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._schedstat, self._stat = f"{proc}/{pid}/schedstat", f"{proc}/{pid}/stat"
        self._readings: deque[tuple[int, int, int]] = deque(maxlen=_KEPT)
        """(time ns, ns on a run queue, major faults) of each reading."""
        self._waits: deque[float] = deque(maxlen=_MINUTE)
        self._cpus = cpus_of(pid, proc, cgroup)
        self._steps = 0
        self._waited_ns = self._stepped_ns = 0
        """On a run queue, and in all, between readings with steps in between."""

    def read(self, now_ns: int, steps: int = 0) -> Pressure | None:
        """Returns the means of the last ten readings; None before the second, or without ``/proc``.

        *steps*: those that the process has taken. Start-up and warm-up are left out of the run's share.
        """
        with suppress(OSError, ValueError, IndexError):
            waited = int(text_of(self._schedstat).split()[1])
            # the name in parentheses may contain spaces
            fields = text_of(self._stat).rpartition(")")[2].split()
            if self._readings and steps > self._steps >= _WARM_UP:
                self._waited_ns += waited - self._readings[-1][1]
                self._stepped_ns += now_ns - self._readings[-1][0]
            self._steps = steps
            self._readings.append((now_ns, waited, int(fields[9])))
        if len(self._readings) < 2:
            return None
        (began, waited_then, faults_then), (ended, waited, faults) = (
            self._readings[0],
            self._readings[-1],
        )
        spent = max(1, ended - began)
        pressure = Pressure(
            cpu_wait_ratio=max(0.0, (waited - waited_then) / spent),
            major_faults_per_second=max(0, faults - faults_then) / spent * 1e9,
            cpus=self._cpus,
            steps_cpu_wait_ratio=self._waited_ns / self._stepped_ns if self._stepped_ns else None,
        )
        self._waits.append(pressure.cpu_wait_ratio)
        return replace(pressure, most_cpu_wait_ratio=max(self._waits))


def cpus_of(pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> float | None:
    """Returns the CPUs that *pid* may use: the least of affinity and cgroup quotas; None if unknown."""
    limits: list[float] = []
    with suppress(OSError):
        limits.append(len(os.sched_getaffinity(pid)))
    for folder in folders(pid, "cpu", proc, cgroup):
        quota = [*_words(folder / "cpu.max"), *_words(folder / "cpu.cfs_quota_us")]
        period = [*quota[1:], *_words(folder / "cpu.cfs_period_us")]
        if quota and period and quota[0].isdigit() and period[0].isdigit():
            limits.append(int(quota[0]) / max(1, int(period[0])))
    return min(limits, default=None)


def _words(file: Path) -> list[str]:
    return next(iter(lines_of(file)), [])
