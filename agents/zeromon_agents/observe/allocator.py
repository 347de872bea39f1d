"""Samples the CUDA caching allocator without synchronizing, and without resetting the user's peaks."""

from __future__ import annotations

import inspect
import os
import time
from contextlib import suppress
from typing import Any

import torch

from zeromon.ring.events import Kind
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import OFF, HookContext

_MOST_BLOCK_SEARCHES = 3
_WRITTEN = ("allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes")
"""The fields of a MEMORY record, in order."""


def cuda_ready() -> bool:
    """Whether this process uses CUDA already.

    ``is_available()`` would initialize the driver, after which a forked process cannot use CUDA.
    """
    return bool(torch.cuda.is_initialized())


def allocated_bytes() -> int:
    """Returns the bytes allocated on the current device; -1 without one."""
    if not cuda_ready():
        return -1
    return int(torch.cuda.memory_allocated())


class Allocator:
    """Writes the allocator's figures at the end of a step, and each failed allocation."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._observing = False
        self._capacity = -1
        self._ooms = 0

    def sample(self) -> None:
        """Writes the current figures, in detailed steps also the device's; nothing on a CPU rank."""
        stats = self.sample_tensors()
        if stats is not None and (self._context.detailed or self._capacity < 0):
            self._sample_device(torch.cuda.current_device(), stats)

    def sample_tensors(self) -> dict[str, Any] | None:
        """Writes the allocator's own figures and returns them, without a call into the driver.

        A call into the driver would break the capture of a CUDA graph, which may contain a backward.
        """
        if not cuda_ready():
            return None
        self._observe_oom()
        stats: dict[str, Any] = torch._C._cuda_memoryStats(torch.cuda.current_device())
        current = [stats[name]["all"]["current"] for name in _WRITTEN]
        context = self._context
        context.write(time.monotonic_ns(), Kind.MEMORY, 0, context.phase, 0, 0, 0, *current)
        return stats

    def _sample_device(self, device: int, stats: dict[str, Any]) -> None:
        free, total = torch.cuda.mem_get_info(device)
        fraction = 1.0
        probe = getattr(torch._C, "_cuda_getMemoryFraction", None)
        if probe is not None:
            fraction = float(probe(device))
        self._capacity = int(total * fraction)
        # fmt: off
        self._context.write(time.monotonic_ns(), Kind.MEMORY_PEAK, 0, 0, 0, 0, 0,
                             stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0),
                             free, self._capacity)
        # fmt: on

    def _observe_oom(self) -> None:
        """Attaches an observer once. torch cannot detach it, so the observer checks the mode."""
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if self._observing or attach is None:
            return
        self._observing = True
        context = self._context

        def out_of_memory(_: int, requested: int, total: int, free: int) -> None:
            if context.mode == OFF:
                return
            self._ooms += 1
            largest = -1
            if self._ooms <= _MOST_BLOCK_SEARCHES:  # a script may catch many such errors
                with suppress(Guard.CAUGHT):
                    largest = largest_free_block()
            context.emit(Kind.OOM, requested, total, free, largest)
            keep_snapshot()

        attach(context.guard.guarded(out_of_memory))


def largest_free_block() -> int:
    """Returns the bytes of the largest free block in the cache, after a failed allocation."""
    snapshot = torch.cuda.memory_snapshot
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


def keep_snapshot() -> None:
    """Writes torch's own allocator snapshot once, into the folder that ZEROMON_OOM_SNAPSHOT names.

    The snapshot has a history only when the script made torch record one.
    """
    folder = os.environ.pop("ZEROMON_OOM_SNAPSHOT", "")
    if folder:
        name = f"oom-rank{os.environ.get('RANK', '0')}-{os.getpid()}.pickle"
        torch.cuda.memory._dump_snapshot(os.path.join(folder, name))
