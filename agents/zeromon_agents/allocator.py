"""The CUDA caching allocator, without synchronizing and without touching the user's peaks."""

from __future__ import annotations

import inspect
import os
import time
from contextlib import suppress
from typing import Any

import torch

from zeromon.events import Kind
from zeromon_agents.guard import Guard
from zeromon_agents.recorder import OFF, Recorder

_MOST_LOOKS = 3
_WRITTEN = ("allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes")
"""In the order of a MEMORY record."""


def cuda_ready() -> bool:
    """Whether this process already uses CUDA.

    Not ``is_available()``: that initializes the driver, after which CUDA cannot be used in a fork.
    """
    return bool(torch.cuda.is_initialized())


def allocated_bytes() -> int:
    """Bytes allocated on the current device, or -1 without one."""
    if not cuda_ready():
        return -1
    return int(torch.cuda.memory_allocated())


class Allocator:
    """Samples the allocator at the end of a step and hears of failed allocations."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._observing = False
        self._capacity = -1
        self._ooms = 0

    def sample(self) -> None:
        """Writes the figures of now, at times those of the device; nothing on a CPU rank."""
        stats = self.sample_tensors()
        if stats is not None and (self._recorder.detailed or self._capacity < 0):
            self._sample_device(torch.cuda.current_device(), stats)

    def sample_tensors(self) -> dict[str, Any] | None:
        """Writes the allocator's own figures, without a call into the driver.

        Such a call would spoil the capture of a graph, and a backward may be part of one.
        """
        if not cuda_ready():
            return None
        self._observe_oom()
        stats: dict[str, Any] = torch._C._cuda_memoryStats(torch.cuda.current_device())
        current = [stats[name]["all"]["current"] for name in _WRITTEN]
        recorder = self._recorder
        recorder.write(time.monotonic_ns(), Kind.MEMORY, 0, recorder.phase, 0, 0, 0, *current)
        return stats

    def _sample_device(self, device: int, stats: dict[str, Any]) -> None:
        free, total = torch.cuda.mem_get_info(device)
        fraction = 1.0
        probe = getattr(torch._C, "_cuda_getMemoryFraction", None)
        if probe is not None:
            fraction = float(probe(device))
        self._capacity = int(total * fraction)
        # fmt: off
        self._recorder.write(time.monotonic_ns(), Kind.MEMORY_PEAK, 0, 0, 0, 0, 0,
                             stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0),
                             free, self._capacity)
        # fmt: on

    def _observe_oom(self) -> None:
        """Torch offers no way to detach an observer, so it asks the mode each time."""
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if self._observing or attach is None:
            return
        self._observing = True
        recorder = self._recorder

        def out_of_memory(_: int, requested: int, total: int, free: int) -> None:
            if recorder.mode == OFF:
                return
            self._ooms += 1
            largest = -1
            if self._ooms <= _MOST_LOOKS:  # a script may catch many, and go on
                with suppress(Guard.CAUGHT):
                    largest = largest_free_block()
            recorder.emit(Kind.OOM, requested, total, free, largest)
            keep_snapshot()

        attach(recorder.guard.guarded(out_of_memory))


def largest_free_block() -> int:
    """The largest free block in the allocator's cache, bytes; only asked for when it has failed."""
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
    """Writes torch's own allocator snapshot, once, where ZEROMON_OOM_SNAPSHOT names a folder.

    Its history is in it only when the script has asked torch to record one.
    """
    folder = os.environ.pop("ZEROMON_OOM_SNAPSHOT", "")
    if folder:
        name = f"oom-rank{os.environ.get('RANK', '0')}-{os.getpid()}.pickle"
        torch.cuda.memory._dump_snapshot(os.path.join(folder, name))
