"""Bytes by role, from the live tensors of this process, each storage counted once.

Providers say which tensors have which role; the order of providers decides when two claim the same
storage. Nothing here keeps a tensor: only addresses and sizes, and those until the census is done.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from zeromon.events import Kind, Role
from zeromon_agents.allocator import cuda_ready
from zeromon_agents.guard import Guard
from zeromon_agents.recorder import Recorder

Claims = Iterable[tuple[Role, Any]]
Provider = Callable[[], Claims]

LARGE = 16 << 20
_PAGE = mmap.PAGESIZE
_MOST_FAILURES = 3
_OFTEN_UNTIL, _OFTEN, _SELDOM, _AT = 64, 9, 65, 4  # not the rhythm of idle steps


def census_step(step: int, before: int = 0) -> bool:
    """Whether *step* takes a census: the first ones after *before*, then some."""
    seen = step - before
    if seen <= 3:
        return True
    return step % (_OFTEN if seen <= _OFTEN_UNTIL else _SELDOM) == _AT


class OnDisk(NamedTuple):
    """Bytes of a role that are in files; a provider yields it among its tensors."""

    nbytes: int


class Count(NamedTuple):
    """Bytes of one role by place."""

    device: int = 0
    host: int = 0
    disk: int = 0
    pinned: int = 0


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and dicts."""
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from tensors_in(value)
    elif isinstance(content, (list, tuple, set)):
        for value in content:
            yield from tensors_in(value)


def count(
    claims: Claims, note: Callable[[BaseException, str], None] | None = None
) -> dict[Role, Count]:
    """Bytes by role and place. A storage belongs to the first role that claims it.

    Of large storages on the host only the pages that were touched count: a bucket of a gigabyte that
    nothing was written to costs nothing. Tensors without memory of their own (meta, fake) are nothing;
    sparse ones are their indices and values.
    """
    seen: set[int] = set()
    sums: dict[Role, list[int]] = {}
    for role, content in claims:
        row = sums.get(role)
        if row is None:
            row = sums[role] = [0, 0, 0, 0]
        if isinstance(content, OnDisk):
            row[2] += content.nbytes
        elif content is not None:
            try:
                _add(content, row, seen)
            except Guard.CAUGHT as error:  # one odd tensor does not cost the census
                if note is None:
                    raise
                note(error, f"census of {role.label}")
    return {role: Count(*row) for role, row in sums.items()}


def _add(content: Any, row: list[int], seen: set[int]) -> None:
    """Adds a tensor, or a flat list of them as most are; what is nested is flattened first."""
    pins, device, host = cuda_ready(), 0, 0
    for tensor in content if type(content) is list else (content,):
        if tensor is None:
            continue
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except (AttributeError, NotImplementedError, RuntimeError, ValueError):
            if isinstance(tensor, torch.Tensor):
                _add_parts(tensor, row)
            else:
                _add(list(tensors_in(tensor)), row, seen)
            continue
        if not address or address in seen:
            continue
        seen.add(address)
        nbytes = storage.nbytes()
        if not tensor.is_cpu:
            device += nbytes
            continue
        host += nbytes if nbytes < LARGE else touched(address, nbytes)
        if pins and tensor.is_pinned():
            row[3] += nbytes
    row[0] += device
    row[1] += host


def _add_parts(tensor: Any, row: list[int]) -> None:
    """A sparse tensor has no storage of its own."""
    if tensor.layout is torch.strided or tensor.device.type == "meta":
        return
    parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else ()
    for part in parts:
        row[1 if part.is_cpu else 0] += part.untyped_storage().nbytes()


def touched(address: int, nbytes: int) -> int:
    """Bytes of ``[address, address + nbytes)`` that are in memory; all of it where unknown."""
    first = address // _PAGE * _PAGE
    pages = (address + nbytes - first + _PAGE - 1) // _PAGE
    vector = ctypes.create_string_buffer(pages)
    if _mincore is None or _mincore(first, pages * _PAGE, vector) != 0:
        return nbytes
    absent = vector.raw.count(b"\0")
    return min(nbytes, (pages - absent) * _PAGE)


def _load_mincore() -> Any:
    try:
        function = ctypes.CDLL(None).mincore
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return function


_mincore = _load_mincore()


class Census:
    """Takes the census of all providers and writes it down."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._providers: list[Provider] = []
        self._failures: dict[int, int] = {}
        self._told: set[Role] = set()

    def add(self, provider: Provider) -> None:
        """From now on *provider* is asked, too."""
        self._providers.append(provider)

    def remove(self, provider: Provider) -> None:
        """No longer."""
        if provider in self._providers:
            self._providers.remove(provider)

    def _all_claims(self) -> Claims:
        for provider in list(self._providers):
            try:
                yield from provider()
            except Guard.CAUGHT as error:  # noqa: PERF203  an engine that was taken apart
                self._recorder.guard.note(error, "census")
                failures = self._failures[id(provider)] = self._failures.get(id(provider), 0) + 1
                if failures >= _MOST_FAILURES:
                    self._providers.remove(provider)

    def take(self) -> None:
        """Counts, and writes a record a role; a role that is gone is written as nothing once."""
        counts = count(self._all_claims(), self._recorder.guard.note)
        now = time.monotonic_ns()
        for role in sorted(self._told | set(counts)):
            found = counts.get(role, Count())
            # fmt: off
            self._recorder.write(now, Kind.ROLE, role, self._recorder.phase, 0, 0, 0,
                                 found.device, found.host, found.disk, found.pinned)
            # fmt: on
        self._told = set(counts)
