"""Memory of this process on the host: resident set, the cgroup's limit, what is pinned."""

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
_UNLIMITED = 1 << 60


class Host:
    """Reads ``/proc`` and the cgroup; *proc* and *cgroup* are parameters for tests."""

    def __init__(
        self,
        recorder: Recorder,
        proc: Path = Path("/proc"),
        cgroup: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._recorder = recorder
        self._proc = proc
        self._limit = cgroup_limit(proc, cgroup)
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
                             rss, self._limit, available, pinned_bytes() if force else -1)
        # fmt: on


def cgroup_limit(proc: Path, cgroup: Path) -> int:
    """The tightest memory limit of this process's cgroups (v1 and v2), or -1 for none."""
    limits: list[int] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return -1
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = cgroup, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = cgroup / "memory", "memory.limit_in_bytes"
        else:
            continue
        parts = path.strip("/")
        folder = base / parts
        for level in (folder, *folder.parents):
            with suppress(OSError, ValueError):
                limits.append(int((level / name).read_text()))
            if level == base:
                break
    limits = [limit for limit in limits if 0 < limit < _UNLIMITED]
    return min(limits, default=-1)


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
