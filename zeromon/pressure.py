"""What a process waits for on its host: a CPU, pages from disk. Read from ``/proc``, from outside."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zeromon.cgroups import CGROUP, PROC, folders, lines_of
from zeromon.snapshot import Pressure

_KEPT = 11
"""Readings, one a second: figures are of the last ten seconds."""
_MINUTE = 60


class PressureReader:
    """The main thread of one process; *proc* and *cgroup* are for tests."""

    def __init__(self, pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._pid = pid
        self._folder = proc / str(pid)
        self._seen: deque[tuple[int, int, int]] = deque(maxlen=_KEPT)
        """(nanoseconds, nanoseconds on a run queue, major faults)"""
        self._waits: deque[float] = deque(maxlen=_MINUTE)
        self._cpus = cpus_of(pid, proc, cgroup)

    def read(self, now_ns: int) -> Pressure | None:
        """The mean since ten readings ago; None before the second one, and where ``/proc`` has none."""
        with suppress(OSError, ValueError, IndexError):
            waited = int((self._folder / "schedstat").read_text().split()[1])
            # the name in parentheses may hold anything, also spaces
            fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
            self._seen.append((now_ns, waited, int(fields[9])))
        if len(self._seen) < 2:
            return None
        (began, waited_then, faults_then), (ended, waited, faults) = self._seen[0], self._seen[-1]
        spent = max(1, ended - began)
        found = Pressure(
            cpu_wait_ratio=max(0.0, (waited - waited_then) / spent),
            major_faults_per_second=max(0, faults - faults_then) / spent * 1e9,
            cpus=self._cpus,
        )
        self._waits.append(found.cpu_wait_ratio)
        return replace(found, most_cpu_wait_ratio=max(self._waits))


def cpus_of(pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> float | None:
    """The CPUs that *pid* may use, by its affinity and its cgroups' quota; None where unknown."""
    found: list[float] = []
    with suppress(OSError):
        found.append(len(os.sched_getaffinity(pid)))
    for folder in folders(pid, "cpu", proc, cgroup):
        quota = [*_words(folder / "cpu.max"), *_words(folder / "cpu.cfs_quota_us")]
        period = [*quota[1:], *_words(folder / "cpu.cfs_period_us")]
        if quota and period and quota[0].isdigit() and period[0].isdigit():
            found.append(int(quota[0]) / max(1, int(period[0])))
    return min(found, default=None)


def _words(file: Path) -> list[str]:
    return next(iter(lines_of(file)), [])
