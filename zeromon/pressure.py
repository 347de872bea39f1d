"""What a process waits for on its host: a CPU, pages from disk. Read from ``/proc``, from outside."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from pathlib import Path

from zeromon.snapshot import Pressure

_KEPT = 11
"""Readings, one a second: figures are of the last ten seconds."""


class PressureReader:
    """The main thread of one process; *proc* is for tests."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._folder = proc / str(pid)
        self._seen: deque[tuple[int, int, int]] = deque(maxlen=_KEPT)
        """(nanoseconds, nanoseconds on a run queue, major faults)"""

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
        return Pressure(
            cpu_wait_ratio=max(0.0, (waited - waited_then) / spent),
            major_faults_per_second=max(0, faults - faults_then) / spent * 1e9,
        )
