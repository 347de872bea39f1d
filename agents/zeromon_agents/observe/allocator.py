"""Samples the device's allocator without synchronizing, and without resetting the user's peaks.

What an allocator does not count is -1, or no record, and never 0: CUDA's own allocator counts neither
blocks nor retries, and torch counts nothing where its cache is off or another allocator is plugged in.
"""

import inspect
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeromon.ring.codes import Kind, Phase
from zeromon_agents.observe import accelerator
from zeromon_agents.observe.accelerator import ASYNC, UNCACHED, Accelerator
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import OFF, HookContext

_MAX_BLOCK_SEARCHES = 3
_WRITTEN = ("allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes")
"""The fields of a MEMORY record, in order."""
_NOT_COUNTED = {ASYNC: ("inactive_split_bytes", "num_alloc_retries", "num_ooms")}
"""Counters that an allocator leaves at 0."""


def allocated_bytes() -> int:
    """Returns the bytes allocated on the current device; -1 without one, and where they are unknown."""
    device = accelerator.ready_device()
    kind = device.allocator if device is not None else UNCACHED
    if device is None or kind == UNCACHED or (kind == ASYNC and device.is_current_stream_capturing()):
        return -1
    # Not the module's `memory_allocated`, which formats each of 300 counters for the sake of one
    stats = device.memory_stats()
    return int(stats["allocated_bytes"]["all"]["current"]) if stats else -1


class Allocator:
    """Writes the allocator's figures at the end of a step, and each failed allocation."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._device: Accelerator | None = None
        self.kind = ""
        """The allocator of memory on the device; "" before the process uses it."""
        self._counts = False
        """True if it has figures."""
        self._capacity = -1
        self._ooms = self._peak = 0

    def sample(self) -> None:
        """Writes the current figures, in detailed steps also the device's; nothing on a CPU rank."""
        stats, device = self.sample_tensors(Phase.OPTIMIZER), self._device
        if stats is not None and device and (self._context.detailed or self._capacity < 0):
            free, total = device.memory_info()
            self._capacity = int(total * device.memory_fraction()) if total >= 0 else -1
            retries, ooms = stats.get("num_alloc_retries", -1), stats.get("num_ooms", -1)
            self._context.emit(Kind.MEMORY_PEAK, retries, ooms, free, self._capacity)

    def sample_tensors(self, ended: Phase) -> Mapping[str, Any] | None:
        """Writes the allocator's own figures and returns them, without a call into the driver.

        *ended*: the phase that has just ended, to which a new peak belongs. A call into the driver would
        break the capture of a graph, which may contain a backward.
        """
        device = self._device or self._meet_device()
        if device is None or not self._counts:
            return None
        if self.kind == ASYNC and device.is_current_stream_capturing():
            return None  # its figures come from the driver
        stats = self._read(device)
        if stats is None:
            return None
        current = [int(stats[n]["all"]["current"]) if n in stats else -1 for n in _WRITTEN]
        context = self._context
        context.write(time.monotonic_ns(), Kind.MEMORY, 0, context.phase, 0, 0, 0, *current)
        self._write_peak(stats, ended)
        return stats

    def phase_ends(self, ended: Phase) -> None:
        """Notes a new peak of the phase that has just ended."""
        device = self._device or self._meet_device()
        if device is not None and self._counts and self.kind != ASYNC:  # else it would ask the driver
            self._write_peak(self._read(device) or {}, ended)

    def _write_peak(self, stats: Mapping[str, Any], phase: int) -> None:
        """Writes the most bytes ever allocated, where they have grown; a script may reset torch's."""
        peak = int(stats["allocated_bytes"]["all"].get("peak", 0)) if "allocated_bytes" in stats else 0
        if peak > self._peak:
            self._peak = peak
            context = self._context
            fields = peak, context.step + 1, 0, 0
            context.write(time.monotonic_ns(), Kind.ALLOCATED_PEAK, 0, phase, 0, 0, 0, *fields)

    def _meet_device(self) -> Accelerator | None:
        """Takes the accelerator once the process uses it, and observes its failed allocations."""
        device = accelerator.ready_device()
        if device is None:
            return None
        self._device, self.kind = device, device.allocator
        self._counts = self.kind != UNCACHED
        with suppress(Guard.CAUGHT):  # CUDA's own allocator refuses observers
            self._observe_oom(device)
        return device

    def _read(self, device: Accelerator) -> Mapping[str, Any] | None:
        try:
            stats = device.memory_stats()
        except RuntimeError:  # an allocator that is plugged in need not count
            self._counts = False
            return None
        missing = _NOT_COUNTED.get(self.kind)
        if stats is None or missing is None:
            return stats
        return {name: value for name, value in stats.items() if name not in missing}

    def _observe_oom(self, device: Accelerator) -> None:
        """Attaches an observer. torch cannot detach it, so the observer checks the mode."""
        attach = device.out_of_memory_observers()
        if attach is None:
            return
        context = self._context

        def out_of_memory(_: int, requested: int, total: int, free: int) -> None:
            if context.mode == OFF:
                return
            self._ooms += 1
            largest = -1
            if self._ooms <= _MAX_BLOCK_SEARCHES:  # a script may catch many such errors
                with suppress(Guard.CAUGHT):
                    largest = largest_free_block(device)
            context.emit(Kind.OOM, requested, total, free, largest)
            self._write_peak(self._read(device) or {}, context.phase)
            # torch's own snapshot has a history only when the script made torch record one.
            # Popped: a script that catches the error would write a snapshot at each one
            folder = os.environ.pop("ZEROMON_OOM_SNAPSHOT", "")
            dump = getattr(getattr(device.module, "memory", None), "_dump_snapshot", None)
            if folder and dump is not None:
                name = f"oom-rank{os.environ.get('RANK', '0')}-{os.getpid()}.pickle"
                dump(os.path.join(folder, name))

        attach(context.guard.guarded(out_of_memory))


def largest_free_block(device: Accelerator) -> int:
    """Returns the bytes of the largest free block in the cache, after a failed allocation."""
    snapshot = device.module.memory_snapshot
    # A torch without the option copies the script's whole allocation history as well
    lean = "include_traces" in inspect.signature(snapshot).parameters
    return max(
        (
            block["size"]
            for segment in (snapshot(include_traces=False) if lean else snapshot())
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ),
        default=0,
    )


# ---- samples this process's memory on the host --------------------------------------------------

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
        now_ns = time.monotonic_ns()
        if now_ns < self._next_ns and not force:
            return
        self._next_ns = now_ns + _EVERY_NS
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
        for row in (proc / "meminfo").read_text().splitlines():
            if row.startswith("MemAvailable:"):
                return int(row.split()[1]) * 1024
    return -1


def pinned_bytes() -> int:
    """Returns the bytes that torch's caching host allocator holds pinned; -1 where unknown."""
    device = accelerator.ready_device()
    return device.pinned_bytes() if device is not None else -1
