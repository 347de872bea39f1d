"""For a program on a device: marks of steps, phases and units on its timeline.

Where torch.profiler traces the kernels, as on a GPU, a mark is a kernel of its own, and :data:`names`
says which mark each of them is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

names: list[str] | None = None
"""The marks that the program set, in their order; None: its kernels are not traced."""


@cache
def _model() -> ctypes.CDLL | None:
    """The virtual device's model; None on another device."""
    if "VGPU_DIR" not in os.environ:
        return None
    model = ctypes.CDLL("libvgpu.so")
    model.vgpu_mark.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    return model


def mark(name: str) -> None:
    """Marks a place on the current stream: ``step 3``, or the name of the phase that begins there."""
    if names is not None:
        torch.cuda._sleep(1)
        names.append(name)
    elif model := _model():
        # what a mark takes itself is part of the phase that it ends
        device = torch.cuda.current_device()
        model.vgpu_mark(torch._C._cuda_getCurrentRawStream(device), device, name.encode())


@contextmanager
def unit(name: str) -> Iterator[None]:
    """What is enqueued meanwhile belongs to this unit, on whatever thread."""
    model = _model()
    if model:
        model.vgpu_set_unit(name.encode())
    yield
    if model:
        model.vgpu_set_unit(b"")
