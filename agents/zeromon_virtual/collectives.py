"""Collectives on virtual streams: each takes the time of its link, and moves no data.

A synchronous collective runs in the current stream and returns no Work, as NCCL's does since torch 2.8.
An asynchronous one runs in a stream of its group, and the stream that waits for its Work is blocked
until its end.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

from zeromon_virtual.clock import Clock, Link, Stream, Work as Entry
from zeromon_virtual.cost import bus_factor
from zeromon_virtual.device import NAME

PAYLOADS = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_": ("all_gather", "output_tensors"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "alltoall_base_": ("all_to_all", "input"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
}
"""Operator of c10d -> the collective, and the argument that is its full payload."""

FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""Operators of _c10d_functional, which DTensor issues, with the collective that each is."""

_METHODS = (
    "allreduce", "allreduce_coalesced", "_allgather_base", "all_gather_single", "allgather",
    "allgather_into_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter", "reduce_scatter_tensor_coalesced", "alltoall_base", "all_to_all_single",
    "alltoall", "broadcast", "reduce",
)  # fmt: skip
"""Methods of ProcessGroup that return a Work, or nothing where the collective was synchronous."""


class VirtualWork(Work):
    """A Work as a device's group returns it: without a ``wait`` of its own, which FakeWork has.

    A tool that patches ``Work.wait`` sees it.
    """

    def result(self) -> list[Any]:
        """Returns no tensors; torch asks for them when it registers a Work."""
        return []


class Collectives:
    """Gives each collective its time on the clock."""

    def __init__(
        self, clock: Clock, link_of: Callable[[list[int]], Link], launch_seconds: float
    ) -> None:
        self._clock = clock
        self._link_of = link_of
        self._launch_ns = round(launch_seconds * 1e9)
        self._groups: dict[str, tuple[Link, Stream, int]] = {}
        self._pending: dict[int, tuple[Any, Entry]] = {}
        """id of a Work or a storage -> its owner, alive until a wait, and its collective."""
        self._synchronous = False

    def issue(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Runs the collective of the c10d operator *func*, and returns what the operator returns."""
        found = PAYLOADS.get(func.overloadpacket.__name__)
        if found is None:
            return out
        names = [argument.name for argument in func._schema.arguments]
        bound = dict(zip(names, args, strict=False)) | kwargs
        pg = ProcessGroup.unbox(bound["process_group"])
        is_async = bound.get("async_op", bound.get("asyncOp", True))
        op, payload = found
        entry = self._run(op, pg, total_bytes(bound[payload]), is_async=is_async)
        self._synchronous = not is_async
        if not is_async:
            return out
        work = VirtualWork()
        self._pending[id(work)] = work, entry
        return (*out[:-1], work.boxed()) if isinstance(out, (tuple, list)) else work.boxed()

    def issue_functional(self, func: Any, args: Any, out: Any) -> None:
        """Runs the collective of the _c10d_functional operator *func*, or waits for it."""
        name = func.overloadpacket.__name__
        if name == "wait_tensor":
            self._wait_for(args[0].untyped_storage())
        elif name in FUNCTIONAL:
            op = FUNCTIONAL[name]
            pg = dist.distributed_c10d._resolve_process_group(args[-1])
            full = out if op == "all_gather" else args[0]
            entry = self._run(op, pg, total_bytes(full), is_async=True)
            self._pending[id(out.untyped_storage())] = out, entry

    def _wait_for(self, handle: Any) -> bool:
        """Lets the current stream wait for the collective of *handle*, a Work or a storage."""
        pending = self._pending.pop(id(handle), None)
        if pending is not None:
            self._clock.wait_for(pending[1])
        return pending is not None

    def _run(self, op: str, pg: Any, nbytes: int, *, is_async: bool) -> Entry:
        clock = self._clock
        link, stream, ranks = self._group(pg)
        clock.delay_host(self._launch_ns)
        if is_async:
            stream.wait_stream(clock.current)
        else:
            stream = clock.current
        return clock.transfer(op, link, nbytes * bus_factor(op, ranks), stream)

    def _group(self, pg: Any) -> tuple[Link, Stream, int]:
        name = pg.group_name
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(pg)
            self._groups[name] = (
                self._link_of(ranks),
                self._clock.stream(f"group {name}"),
                len(ranks),
            )
        return self._groups[name]

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Lets ``Work.wait`` block the current stream, and synchronous calls return no Work."""
        with ExitStack() as stack:
            stack.enter_context(_replaced(Work, "wait", self._wait))
            for name in _METHODS:
                if name in vars(ProcessGroup):
                    stack.enter_context(_replaced(ProcessGroup, name, self._call))
            yield

    def _wait(self, original: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
        return self._wait_for(work) or original(work, *args, **kwargs)

    def _call(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._synchronous = False
        work = original(*args, **kwargs)
        return None if self._synchronous else work


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Calls ``function(original, *args)`` in place of the method *name* of *owner*."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)


def total_bytes(payload: Any) -> int:
    """Returns the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(payload, torch.Tensor):
        return int(payload.nbytes)
    return sum(map(total_bytes, payload))


@contextmanager
def world(size: int) -> Iterator[None]:
    """Makes this process rank 0 of *size* ranks that do not exist."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create_fake_pg, extended_api=True, devices=[NAME])
    dist.init_process_group(NAME, store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
