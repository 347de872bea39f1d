"""Finds the processes of this node that use most CPU time. Reads ``/proc`` only."""

import os
from contextlib import suppress
from pathlib import Path

from zeromon.probes.cgroups import PROC, text_of
from zeromon.snapshot import CpuUser

_MAX_USERS = 8
_LEAST_CPUS = 0.05
_LONGEST_NAME = 60
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
        spent, parents = self._all_spent()
        if now_ns - self._read_ns > _MAX_GAP_NS:  # nobody asked meanwhile
            self._spent = {}
        ticks = (now_ns - self._read_ns) / 1e9 * os.sysconf("SC_CLK_TCK")
        both = spent.keys() & self._spent.keys()
        used = {pid: (spent[pid] - self._spent[pid]) / ticks for pid in both}
        most = sorted((pid for pid in used if used[pid] >= _LEAST_CPUS), key=lambda pid: -used[pid])
        self._users = tuple(
            CpuUser(pid=pid, name=self._name(pid), cpus=used[pid], parent=parents[pid])
            for pid in most[:_MAX_USERS]
        )
        self._spent, self._read_ns = spent, now_ns
        return self._users

    def _all_spent(self) -> tuple[dict[int, int], dict[int, int]]:
        """Returns pid -> clock ticks of CPU time, and pid -> pid of the parent."""
        spent: dict[int, int] = {}
        parents: dict[int, int] = {}
        for name in (folder.name for folder in self._proc.iterdir()):
            if name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    fields = text_of(f"{self._proc}/{name}/stat").rpartition(")")[2].split()
                    spent[int(name)] = int(fields[11]) + int(fields[12])
                    parents[int(name)] = int(fields[1])
        return spent, parents

    def _name(self, pid: int) -> str:
        """The program and its first argument that is no option: ``python train.py``."""
        with suppress(OSError):
            words = text_of(f"{self._proc}/{pid}/cmdline").split("\0")
            named = [Path(word).name for word in words if word and not word.startswith("-")]
            if named:
                return " ".join(named[:2])[:_LONGEST_NAME]
        return "a process"
