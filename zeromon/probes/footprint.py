"""The host memory of a process and everything that it starts: now, and at the peak of each process."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from zeromon.probes.cgroups import PROC, lines_of
from zeromon.probes.host_memory import HostReader
from zeromon.probes.process import children_of

_LOOK_FOR_CHILDREN_SECONDS = 0.2
_KEPT = ("VmHWM:", "RssAnon:", "RssFile:", "RssShmem:")


class Footprint:
    """Follows the tree of *pid*, or that process alone where it is not *deep*.

    Pages of files do not count: the kernel takes them back first.
    """

    def __init__(self, pid: int, proc: Path = PROC, *, deep: bool = True) -> None:
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
        self._find()
        total = 0
        self._living = set()
        for pid in self._pids:
            lines = lines_of(self._proc / str(pid) / "status")
            fields = {line[0]: int(line[1]) * 1024 for line in lines if line[0] in _KEPT}
            if not fields:
                continue
            self._living.add(pid)
            now = fields.get("RssAnon:", 0) + fields.get("RssShmem:", 0)
            high, files = fields.get("VmHWM:", 0), fields.get("RssFile:", 0)
            known, before = self._high.get(pid, (0, 0))
            # where memory ends the kernel takes files back: they are most when the peak begins
            peak = high - max(files, before) if high > known else 0
            self._most[pid] = max(self._most.get(pid, 0), now, peak)
            self._high[pid] = high, files
            total += now
        return total

    def peak(self) -> int:
        """Returns the sum of the peaks of the living processes: ranks peak together."""
        return sum(self._most.get(pid, 0) for pid in self._living)

    def headroom(self) -> tuple[int, int]:
        """Returns the bytes that can still be taken, and the OOM kills that the cgroup counted."""
        self._reader.new_round()
        memory = self._reader.read(self.pid)
        return memory.headroom_bytes, memory.oom_kills

    def end(self, *, patience_seconds: float = 10.0) -> None:
        """Ends all processes by SIGTERM, and what remains by SIGKILL."""
        self._find(at_once=True)
        _signal(self._pids, signal.SIGTERM)
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline and self._alive():
            time.sleep(0.05)
        self.kill()

    def kill(self, *, all_but: Iterable[int] = ()) -> None:
        """Ends all processes by SIGKILL, at once, before they take more."""
        self._find(at_once=True)
        _signal(self._pids - set(all_but), signal.SIGKILL)

    def _alive(self) -> bool:
        return any(_state(self._proc, pid) not in ("", "Z") for pid in self._pids)

    def _find(self, *, at_once: bool = False) -> None:
        """Adds the children of the known processes; a child keeps its place when its parent ends."""
        now = time.monotonic()
        if not self._deep:
            return
        if not at_once and now - self._looked < _LOOK_FOR_CHILDREN_SECONDS:
            return
        self._looked = now
        waiting = list(self._pids)
        while waiting:
            found = children_of(waiting.pop(), self._proc) - self._pids
            self._pids |= found
            waiting += found
        self._pids = {pid for pid in self._pids if _state(self._proc, pid)}


def _state(proc: Path, pid: int) -> str:
    """The letter of the state; "" where there is no such process."""
    with suppress(OSError, IndexError):
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
