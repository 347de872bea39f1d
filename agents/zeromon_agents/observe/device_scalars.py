"""Reads numbers from a device without waiting for it.

A copy into pinned memory is enqueued behind the work that computes the number. Its value is read in a
later step, when an event behind the copy has completed. Nothing else refers to the tensor meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from zeromon_agents.observe.accelerator import Accelerator

_SLOTS = 64
"""The most copies under way: with a host that is further ahead, some numbers are left out."""
_INTERVAL_NS = 20_000_000
"""Between two copies, each of which takes the host some 15 us."""


class DeviceScalars:
    """Copies numbers of *accelerator* and reads them later; only on CUDA and ROCm."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._device = accelerator
        self._record: Any = accelerator.Event.record
        self._slots: dict[torch.dtype, torch.Tensor | None] = {}
        """Type of a number -> pinned memory, None where there was none. Without one for each type, a
        conversion would allocate on the device."""
        self._events: list[Any] = []
        self._pending: deque[tuple[Any, torch.Tensor, Callable[[float], None]]] = deque()
        self._copied_ns = self._copies = 0

    def read_later(self, number: torch.Tensor, give: Callable[[float], None]) -> None:
        """Calls *give* in a later step with the value of *number*, a tensor of no dimension."""
        now = time.monotonic_ns()
        if now - self._copied_ns < _INTERVAL_NS or len(self._pending) >= _SLOTS:
            return
        if self._device.is_current_stream_capturing():
            return
        # modes of the script, as one that counts FLOPs, would see the copy
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if number.dtype not in self._slots:
                self._slots[number.dtype] = _pinned(number.dtype)
            slots = self._slots[number.dtype]
            if slots is None:
                return
            slot = slots[self._copies % _SLOTS]
            slot.copy_(number.detach(), non_blocking=True)
        event = self._events.pop() if self._events else self._device.Event()
        self._record(event, self._device.current_stream(number.device))
        self._pending.append((event, slot, give))
        self._copied_ns, self._copies = now, self._copies + 1

    def poll(self) -> None:
        """Reads the numbers whose copies have ended. Never blocks."""
        if self._pending and self._device.is_current_stream_capturing():
            return
        while self._pending and self._pending[0][0].query():
            event, slot, give = self._pending.popleft()
            self._events.append(event)
            give(slot.item())


def _pinned(dtype: torch.dtype) -> torch.Tensor | None:
    try:
        return torch.empty(_SLOTS, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError:  # no more memory may be pinned
        return None
