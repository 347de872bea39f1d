"""Samples this process's memory on the host: resident set, available memory, pinned memory.

The collector reads the limits from outside (``zeromon.probes.host_memory``).
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from zeromon.ring.events import Kind
from zeromon_agents.observe import accelerator
from zeromon_agents.runtime.hook_context import HookContext

_PAGE = os.sysconf("SC_PAGE_SIZE")
_EVERY_NS = 100_000_000


class Host:
    """Reads ``/proc``. *proc* is a parameter for tests."""

    def __init__(self, context: HookContext, proc: Path = Path("/proc")) -> None:
        self._context = context
        self._proc = proc
        self._statm = str(proc / "self" / "statm")
        self._next_ns = 0

    def sample(self, *, force: bool = False) -> None:
        """Writes a sample of host memory, at most ten per second without *force*."""
        now = time.monotonic_ns()
        if now < self._next_ns and not force:
            return
        self._next_ns = now + _EVERY_NS
        rss = resident_bytes(self._statm)
        available = available_bytes(self._proc) if force else -1
        self._context.emit(Kind.HOST, rss, available, pinned_bytes() if force else -1)


def resident_bytes(statm: str) -> int:
    """Returns this process's resident set in bytes. Raises OSError where *statm* cannot be read.

    The step waits for it: in a training loop a Path and a text file take three times as long.
    """
    file = os.open(statm, os.O_RDONLY)
    try:
        return int(os.read(file, 200).split()[1]) * _PAGE
    finally:
        os.close(file)


def available_bytes(proc: Path) -> int:
    """Returns the kernel's MemAvailable in bytes; -1 where unknown."""
    with suppress(OSError, ValueError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return -1


def pinned_bytes() -> int:
    """Returns the bytes that torch's caching host allocator holds pinned; -1 where unknown."""
    device = accelerator.ready()
    return device.pinned_bytes() if device is not None else -1
