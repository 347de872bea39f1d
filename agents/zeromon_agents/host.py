"""Memory of this process on the host: resident set, what is available, what is pinned.

Limits are the collector's to read (``zeromon.hostmemory``): it can, from outside.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from zeromon.events import Kind
from zeromon_agents.recorder import Recorder

_PAGE = os.sysconf("SC_PAGE_SIZE")
_EVERY_NS = 100_000_000


class Host:
    """Reads ``/proc``; *proc* is a parameter for tests."""

    def __init__(self, recorder: Recorder, proc: Path = Path("/proc")) -> None:
        self._recorder = recorder
        self._proc = proc
        self._next_ns = 0

    def sample(self, *, force: bool = False) -> None:
        """Writes a host sample, at most ten a second."""
        now = time.monotonic_ns()
        if now < self._next_ns and not force:
            return
        self._next_ns = now + _EVERY_NS
        rss = int((self._proc / "self" / "statm").read_text().split()[1]) * _PAGE
        available = available_bytes(self._proc) if force else -1
        # fmt: off
        self._recorder.write(now, Kind.HOST, 0, self._recorder.phase, 0, 0, 0,
                             rss, available, pinned_bytes() if force else -1, 0)
        # fmt: on


def available_bytes(proc: Path) -> int:
    """What the kernel says can still be had, or -1."""
    with suppress(OSError, ValueError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return -1


def pinned_bytes() -> int:
    """Bytes that the caching host allocator holds pinned, or -1 where that is not known."""
    stats = getattr(torch.cuda, "host_memory_stats", None)
    if stats is None or not torch.cuda.is_initialized():
        return -1
    return int(stats().get("allocated_bytes.current", -1))
