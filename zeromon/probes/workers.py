"""Measures the memory of a rank's DataLoader workers, which is in no figure of the rank itself."""

from contextlib import suppress
from pathlib import Path

from zeromon.probes.cgroups import PROC, lines_of, text_of
from zeromon.probes.process import children_of
from zeromon.snapshot import WorkerMemory

_EVERY_NS = 5_000_000_000
"""The kernel walks all pages of a process for its share of each."""
_KEPT_NS = 30_000_000_000
"""The last reading stands for so long without a worker: between two epochs, and when a run ends."""
_NAME = "pt_data_worker"
"""What torch names the main thread of a worker."""


class WorkersReader:
    """Follows the workers of the process *pid*; *proc* is a parameter for tests."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._proc, self._pid = proc, pid
        self._next_ns = self._seen_ns = 0
        self._pids: frozenset[int] = frozenset()
        self._first: tuple[int, int] | None = None
        """Step and bytes at the second reading of these workers: before, they start."""
        self._last: WorkerMemory | None = None

    def read(self, now_ns: int, step: int) -> WorkerMemory | None:
        """Returns what they hold, by the reading of the last seconds; None without a worker."""
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + _EVERY_NS
            now = self._read(step)
            if now is not None or now_ns > self._seen_ns + _KEPT_NS:
                self._last, self._seen_ns = now, now_ns
        return self._last

    def _read(self, step: int) -> WorkerMemory | None:
        sizes = {pid: nbytes for pid in self._workers() if (nbytes := self._pss(pid)) is not None}
        if not sizes:
            return None
        total = sum(sizes.values())
        if self._pids != sizes.keys():  # an epoch starts its workers again
            self._pids, self._first = frozenset(sizes), None
        elif self._first is None:
            self._first = step, total
        began, before = self._first or (step, total)
        return WorkerMemory(
            count=len(sizes),
            nbytes=total,
            grown_bytes=total - before,
            growth_bytes_per_step=(total - before) / (step - began) if step > began else None,
            forked=not any(self._is_spawned(pid) for pid in sizes),
        )

    def _workers(self) -> list[int]:
        pids = children_of(self._pid, self._proc)
        return [pid for pid in pids if self._text(pid, "comm").strip() == _NAME]

    def _is_spawned(self, pid: int) -> bool:
        return "multiprocessing" in self._text(pid, "cmdline")

    def _pss(self, pid: int) -> int | None:
        """A page that several processes share counts in equal parts in each of them."""
        for words in lines_of(self._proc / str(pid) / "smaps_rollup"):
            if words[0] == "Pss:":
                return int(words[1]) * 1024
        return None

    def _text(self, pid: int, name: str) -> str:
        with suppress(OSError):
            return text_of(self._proc / str(pid) / name)
        return ""
