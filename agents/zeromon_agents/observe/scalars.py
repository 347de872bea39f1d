"""Loss, gradient norm and learning rate of a step, as the host or a later copy from the device has them.

No read waits for a device: of a loss on one, a copy is read in a later step. Of several that give the
same quantity, the first one is followed, so that a loss that two loggers get is one series.
"""

import math
import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from zeromon.ring.codes import Kind, Scalar
from zeromon.ring.events import float_bits
from zeromon.ring.model_metadata import ProcessMetadata
from zeromon_agents.observe.accelerator import Accelerator, current_accelerator
from zeromon_agents.observe.step import Steps, known_number
from zeromon_agents.runtime.hook_context import OFF, ON, HookContext

_WORDS = re.compile(r"[a-z0-9]+")
_OF_ANY = frozenset(("train", "training", "step", "samples", "batch", "total", "global"))
_OF_LOSS = _OF_ANY | {"loss", "lm"}
_OF_RATE = _OF_ANY | {"lr", "learning", "rate"}
_OF_NORM = _OF_ANY | {"grad", "grads", "gradient", "gradients", "norm"}


def scalar_of(name: str) -> Scalar | None:
    """Returns what a logger's *name* means: ``train/loss``, ``Gradient norm``, ``lr``; None: other.

    A mean over an epoch and a value of an evaluation are no values of a step.
    """
    name_words = set(_WORDS.findall(name.lower()))
    if "loss" in name_words and name_words <= _OF_LOSS:
        return Scalar.LOSS
    if name_words <= _OF_NORM and name_words - _OF_ANY > {"norm"}:
        return Scalar.GRAD_NORM
    is_rate = "lr" in name_words or {"learning", "rate"} <= name_words
    return Scalar.LEARNING_RATE if is_rate and name_words <= _OF_RATE else None


class Scalars:
    """Writes each quantity into the ring, with the step that it belongs to."""

    def __init__(self, context: HookContext, steps: Steps) -> None:
        self._context, self._steps = context, steps
        self._sources: dict[Scalar, Hashable] = {}
        self._optimizer: Callable[[], Any] = lambda: None
        """A weak reference to the first optimizer that lives."""
        self._rate: float | None = None
        self._clip_norm = 0.0
        self.optimizer_steps = context.guard.guarded(self._optimizer_steps)
        steps.on_loss.append(context.guard.guarded(self._backward_begins))
        device = current_accelerator()
        is_known = device is not None and device.type == "cuda"
        self.device = DeviceScalars(device) if device is not None and is_known else None

    def give_scalar(self, scalar: Scalar, value: Any, source: Hashable) -> None:
        """Writes *value*, unless it is on a device or another *source* was first."""
        number = known_number(value)
        if number is None or self._context.mode == OFF:
            return
        if self._sources.setdefault(scalar, source) == source:
            # Between two steps, a logger gives the value of the step that has ended
            under_way = self._steps.step_under_way or not self._context.step
            self._write_scalar(scalar, number, self._context.step + under_way)

    def give_named(self, name: Any, value: Any) -> None:
        """Writes *value* where *name* is one of those that :func:`scalar_of` knows."""
        scalar = scalar_of(name) if isinstance(name, str) else None
        if scalar is not None:
            self.give_scalar(scalar, value, name)

    def note_clipping(self, max_norm: Any) -> None:
        """Writes what the script limits the norm of its gradients to, once."""
        limit = known_number(max_norm)
        if not self._clip_norm and limit and math.isfinite(limit):
            self._clip_norm = limit
            clipping: ProcessMetadata = {"clip_norm": limit}
            self._context.add_metadata(clipping=clipping)

    def _optimizer_steps(self, optimizer: Any) -> None:
        """Writes the learning rate of the first optimizer that lives, when it has changed."""
        if self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        rate = known_number(optimizer.param_groups[0].get("lr"))
        if rate is not None and rate != self._rate:
            self._rate = rate
            # From here on a logger that came first is not followed: it would give each rate twice
            self._sources[Scalar.LEARNING_RATE] = "optimizer"
            self._write_scalar(Scalar.LEARNING_RATE, rate, self._context.step + 1)

    def _backward_begins(self, tensors: Any) -> None:
        """Writes a loss that is infinite or NaN, of this rank alone."""
        step = self._context.step + 1
        for tensor in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
            if type(tensor) is not torch.Tensor or tensor.dim():
                continue
            try:  # not suppress(), which enters three functions
                if tensor.is_cuda and self.device is not None and self._context.mode == ON:
                    self.device.read_later(tensor, partial(self._write_not_finite, step))
                elif tensor.is_cpu:
                    self._write_not_finite(step, tensor.item())
            except RuntimeError:  # tensors of vmap and grad have no value of their own
                continue

    def _write_not_finite(self, step: int, number: float) -> None:
        if not math.isfinite(number):
            self._write_scalar(Scalar.LOSS, number, step)

    def poll(self) -> None:
        """Writes what has come from the device meanwhile."""
        if self.device is not None:
            self.device.poll()

    def _write_scalar(self, scalar: Scalar, number: float, step: int) -> None:
        self._context.emit(Kind.SCALAR, float_bits(number), step, op=scalar)


# ---- reads numbers from a device without waiting for it -----------------------------------------

_SLOTS = 64
"""The most copies under way: with a host that is further ahead, some numbers are left out."""
_INTERVAL_NS = 20_000_000
"""Between two copies, each of which takes the host some 15 us."""


class DeviceScalars:
    """Copies numbers of *accelerator* and reads them later; only on CUDA and ROCm."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._device = accelerator
        # Taken before the device timer patches it: an event that is not in C would pass that hook
        self._record: Any = accelerator.PlainEvent.record
        self._slots: dict[torch.dtype, torch.Tensor | None] = {}
        """Type of a number -> pinned memory, None where there was none. Without one for each type, a
        conversion would allocate on the device."""
        self._events: list[Any] = []
        self._pending: deque[tuple[Any, torch.Tensor, Callable[[float], None]]] = deque()
        self._copied_ns = self._copies = 0

    def read_later(self, number: torch.Tensor, give: Callable[[float], None]) -> None:
        """Calls *give* in a later step with the value of *number*, a tensor of no dimension."""
        now_ns = time.monotonic_ns()
        if now_ns - self._copied_ns < _INTERVAL_NS or len(self._pending) >= _SLOTS:
            return
        # A captured copy would run again at each replay of the graph
        if self._device.is_current_stream_capturing():
            return
        # modes of the script, as one that counts FLOPs, would see the copy
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if number.dtype not in self._slots:
                self._slots[number.dtype] = _pinned_slots(number.dtype)
            slots = self._slots[number.dtype]
            if slots is None:
                return
            slot = slots[self._copies % _SLOTS]
            slot.copy_(number.detach(), non_blocking=True)
        event = self._events.pop() if self._events else self._device.PlainEvent()
        self._record(event, self._device.current_stream(number.device.index))
        self._pending.append((event, slot, give))
        self._copied_ns, self._copies = now_ns, self._copies + 1

    def poll(self) -> None:
        """Reads the numbers whose copies have ended. Never blocks."""
        # A query of an event ends the capture of a graph
        if self._pending and self._device.is_current_stream_capturing():
            return
        while self._pending and self._pending[0][0].query():
            event, slot, give = self._pending.popleft()
            self._events.append(event)
            give(slot.item())


def _pinned_slots(dtype: torch.dtype) -> torch.Tensor | None:
    try:
        return torch.empty(_SLOTS, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError:  # no more memory may be pinned
        return None
