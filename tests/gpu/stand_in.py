"""``torch.cuda`` on the CPU, as far as ranks.py uses it, so that its code runs where there is no GPU.

Time is the host's, nothing is asynchronous, and a figure that only an allocator of a device has is 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

CYCLES_A_SECOND = 1e9


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.ns = 0

    def record(self, stream: Any = None) -> None:
        self.ns = time.monotonic_ns()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return (later.ns - self.ns) / 1e6


class Stream:
    def wait_stream(self, other: Any) -> None: ...


_CURRENT = Stream()


def current_stream() -> Stream:
    return _CURRENT


def stream(stream: Stream) -> AbstractContextManager[None]:
    return nullcontext()


def _sleep(cycles: int) -> None:
    time.sleep(cycles / CYCLES_A_SECOND)


def synchronize() -> None: ...


def set_device(index: int) -> None: ...


def set_sync_debug_mode(mode: str) -> None: ...


def set_per_process_memory_fraction(fraction: float) -> None: ...


def reset_peak_memory_stats() -> None: ...


def memory_allocated() -> int:
    return 0


memory_reserved = max_memory_allocated = memory_allocated


def memory_stats() -> dict[str, Any]:
    return {}


def memory_snapshot() -> list[dict[str, Any]]:
    return []


def captured(body: Callable[[], None], mode: str, during: Callable[[], None]) -> Callable[[], None]:
    """Runs *body* at once; a replay runs it again."""
    body()
    during()
    return body
