"""Counts bytes by memory role from the live tensors of this process, each storage once.

A provider yields (role, tensors). When two providers claim the same storage, the first one gets it. The
census keeps no tensor: only addresses and sizes, and those until the census ends.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from zeromon.ring.codes import Kind, Role
from zeromon_agents.observe import accelerator
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import HookContext

Claims = Iterable[tuple[Role, Any]]
Provider = Callable[[], Claims]

LARGE = 16 << 20
_PAGE = mmap.PAGESIZE
_MAX_FAILURES = 3
_OFTEN_UNTIL, _OFTEN, _SELDOM, _AT = 64, 9, 65, 4  # never a control step


def census_step(step: int, steps_before: int = 0) -> bool:
    """Returns whether *step* takes a census: the first 3 after *steps_before*, 1 in 9, later 1 in 65."""
    watched = step - steps_before
    if watched <= 3:
        return True
    return step % (_OFTEN if watched <= _OFTEN_UNTIL else _SELDOM) == _AT


class OnDisk(NamedTuple):
    """Bytes of a role that are in files. A provider yields it in place of tensors."""

    nbytes: int


class Count(NamedTuple):
    """Bytes of one role by place; *pinned* is a part of *host*."""

    device: int = 0
    host: int = 0
    disk: int = 0
    pinned: int = 0


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested lists and dicts."""
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from tensors_in(value)
    elif isinstance(content, (list, tuple, set)):
        for value in content:
            yield from tensors_in(value)


def role_counts(
    claims: Claims, note: Callable[[BaseException, str], None] | None = None
) -> dict[Role, Count]:
    """Returns bytes by role and place. A storage belongs to the first role that claims it.

    Of a large storage on the host, only pages that were touched count: an untouched bucket of a
    gigabyte takes no memory. A tensor without memory of its own (meta, fake) counts as 0 bytes, a sparse
    one as its indices and values. An error of one tensor goes to *note*, or to the caller without it.
    """
    addresses: set[int] = set()
    sums: dict[Role, list[int]] = {}
    for role, content in claims:
        row = sums.get(role)
        if row is None:
            row = sums[role] = [0, 0, 0, 0]
        if isinstance(content, OnDisk):
            row[2] += content.nbytes
        elif content is not None:
            try:
                _add_tensors(content, row, addresses)
            except Guard.CAUGHT as error:  # one unreadable tensor does not end the census
                if note is None:
                    raise
                note(error, f"census of {role.label}")
    return {role: Count(*row) for role, row in sums.items()}


def _add_tensors(content: Any, row: list[int], addresses: set[int]) -> None:
    """Adds a tensor or a flat list of tensors to *row*; flattens what is nested deeper."""
    # Without a device in use nothing is pinned, and is_pinned() would ask the driver
    pins, device, host = accelerator.ready_device() is not None, 0, 0
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
                _add_tensors(list(tensors_in(tensor)), row, addresses)
            continue
        # A meta tensor has a size and the address 0, and takes no memory
        if not address or address in addresses:
            continue
        addresses.add(address)
        nbytes = storage.nbytes()
        if not tensor.is_cpu:
            device += nbytes
            continue
        host += nbytes if nbytes < LARGE else touched_bytes(address, nbytes)
        if pins and tensor.is_pinned():
            row[3] += nbytes
    row[0] += device
    row[1] += host


def _add_parts(tensor: Any, row: list[int]) -> None:
    """Adds a tensor without a storage of its own, such as a sparse one."""
    if tensor.layout is torch.strided or tensor.device.type == "meta":
        return
    components = (tensor._indices(), tensor._values()) if tensor.is_sparse else ()
    for component in components:
        row[1 if component.is_cpu else 0] += component.untyped_storage().nbytes()


def touched_bytes(address: int, nbytes: int) -> int:
    """Returns the resident bytes of ``[address, address + nbytes)``; *nbytes* where unknown."""
    first_page = address // _PAGE * _PAGE
    pages = (address + nbytes - first_page + _PAGE - 1) // _PAGE
    vector = ctypes.create_string_buffer(pages)
    if _mincore is None or _mincore(first_page, pages * _PAGE, vector) != 0:
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
    """Counts what all providers claim, and writes one record for each role."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._sources: list[Callable[[], Iterable[Provider]]] = []
        self._failures: dict[Provider, int] = {}
        self._written: set[Role] = set()

    def add(self, source: Callable[[], Iterable[Provider]]) -> None:
        """Adds a *source*, which returns the providers of each census."""
        self._sources.append(source)

    def _all_claims(self) -> Claims:
        for provider in [offered for source in self._sources for offered in source()]:
            failures = self._failures.get(provider, 0)
            # One error per census would add up to the thousand at which the guard switches the agent off
            if failures >= _MAX_FAILURES:
                continue
            try:
                yield from provider()
            except Guard.CAUGHT as error:  # for example an engine that was taken apart
                self._context.guard.note(error, "census")
                self._failures[provider] = failures + 1

    def take(self) -> None:
        """Counts, and writes one record for each role; zeros once for a role that is gone."""
        counts = role_counts(self._all_claims(), self._context.guard.note)
        for role in sorted(self._written | set(counts)):
            of_role = counts.get(role, Count())
            self._context.emit(
                Kind.ROLE, of_role.device, of_role.host, of_role.disk, of_role.pinned, op=role
            )
        self._written = set(counts)
