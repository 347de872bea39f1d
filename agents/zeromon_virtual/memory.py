"""Counts the allocated bytes of fake tensors, by where they were allocated.

A storage counts from its first operator, or from its resize, until Python frees it. Sizes are rounded as
the caching allocator of CUDA rounds them; reserved memory and fragmentation are not modelled.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ROUND = 512


class Memory:
    """The bytes that are allocated now, and at the peak since :meth:`forget`."""

    def __init__(self) -> None:
        self.place = "build"
        """What the run does now; see :meth:`within`."""
        self._known: dict[int, tuple[Any, str, int]] = {}
        """id of a storage -> weak reference, place of allocation, bytes."""
        self.now: Counter[str] = Counter()
        self.forget()

    def forget(self) -> None:
        """Starts a new peak at the bytes of now."""
        self.peak = Counter(self.now)
        self.peak_bytes = sum(self.now.values())

    @contextmanager
    def within(self, place: str) -> Iterator[None]:
        """Gives what is allocated inside to *place*."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def see(self, tensor: Any) -> None:
        """Counts the storage of *tensor*, unless it is counted already."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._known:
            self._set(storage, storage.nbytes())

    def resized(self, storage: Any) -> None:
        """Counts a storage anew that is counted already; others belong to no tensor of the device."""
        known = self._known.get(id(storage))
        if known is not None:
            self._change(known[1], -known[2])
            self._set(storage, storage.nbytes())

    def _set(self, storage: Any, nbytes: int) -> None:
        key, size = id(storage), -(-nbytes // _ROUND) * _ROUND
        forget = weakref.ref(storage, lambda _: self._freed(key))
        self._known[key] = (forget, self.place, size)
        self._change(self.place, size)

    def _freed(self, key: int) -> None:
        _, place, size = self._known.pop(key)
        self._change(place, -size)

    def _change(self, place: str, nbytes: int) -> None:
        self.now[place] += nbytes
        total = sum(self.now.values())
        if total > self.peak_bytes:
            self.peak_bytes, self.peak = total, Counter(self.now)


@contextmanager
def counted(memory: Memory) -> Iterator[None]:
    """Tells *memory* of storages that a framework resizes: FSDP frees and allocates parameters so."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        memory.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize
