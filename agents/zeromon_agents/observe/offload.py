"""The traffic of offloading: bytes and time between device, host and disk, summed over each step.

DeepSpeed keeps no such counters. All disk traffic goes through the handle of DeepSpeed's asynchronous
I/O operator, so the handle's class is the one point to patch. Copies between device and host happen in
a few methods of the ZeRO optimizers, which :mod:`zeromon_agents.hooks.deepspeed` wraps and reports here.
"""

import time
from collections import defaultdict
from functools import partial
from typing import Any

from zeromon.ring.codes import Kind, Path
from zeromon_agents.runtime.around import RAISED, Patches, around
from zeromon_agents.runtime.hook_context import OFF, HookContext

BUILDERS = "deepspeed.ops.op_builder.builder"
_OPERATORS = {"async_io": "aio_handle", "gds": "gds_handle"}


class Transfers:
    """Sums transfers and writes one record for each path and step."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._sums: defaultdict[Path, list[int]] = defaultdict(lambda: [0] * 4)

    def add(self, path: Path, nbytes: int, busy_ns: int = 0, blocked_ns: int = 0) -> None:
        """Adds a transfer of *nbytes* along *path*. Times are in nanoseconds, 0 where unknown."""
        row = self._sums[path]
        row[0] += nbytes
        row[1] += busy_ns
        row[2] += blocked_ns
        row[3] += 1

    def flush(self) -> None:
        """Writes the sums of the step that ends, and resets them."""
        for path, sums in self._sums.items():
            self._context.emit(Kind.TRANSFER, *sums, op=path)
        self._sums.clear()


class Disk:
    """The hooks on the handles of DeepSpeed's asynchronous I/O.

    Requests of a handle count as busy from the first submission to the return of ``wait``. Requests
    may have ended before a late wait, so the time is an upper bound and the speed a lower bound.
    """

    def __init__(self, context: HookContext, transfers: Transfers, patches: Patches) -> None:
        self._context = context
        self._transfers = transfers
        self._patches = patches
        self._pending: dict[int, tuple[int, dict[Path, int]]] = {}
        self._watched: set[Any] = set()

    def watch(self, builders: Any) -> None:
        """Patches the operators that are loaded, and ``OpBuilder.load`` for those loaded later."""
        base = builders.OpBuilder
        self._patches.wrap(base, "load", around(self._context, after=self._loaded, active_from=OFF))
        for name, module in getattr(base, "_loaded_ops", {}).items():
            self._watch_operator(name, module)

    def _loaded(self, _: None, module: Any, builder: Any, *__: Any) -> None:
        if module is not RAISED:
            self._watch_operator(builder.name, module)

    def _watch_operator(self, name: str, module: Any) -> None:
        handle = getattr(module, _OPERATORS.get(name, ""), None)
        # OpBuilder.load() returns the same module each time, and a handle wrapped twice counts twice
        if handle is None or handle in self._watched:
            return
        self._watched.add(handle)
        for method, path in (("pread", Path.DISK_READ), ("pwrite", Path.DISK_WRITE)):
            submit = around(self._context, partial(self._request_submitted, path), where=path.label)
            self._patches.wrap_in(handle, f"async_{method}", submit)
            transferred = partial(self._request_transferred, path)
            transfer = around(self._context, _now_ns, transferred, where=path.label)
            self._patches.wrap_in(handle, f"sync_{method}", transfer)
        # In every mode: requests from before the agent went off would count in a later wait
        wait = around(self._context, _now_ns, self._divide_wait, where="aio wait", active_from=OFF)
        self._patches.wrap_in(handle, "wait", wait)

    def _request_submitted(self, path: Path, handle: Any, buffer: Any, *_: Any, **__: Any) -> None:
        nbytes = self._pending.setdefault(id(handle), (time.monotonic_ns(), {}))[1]
        nbytes[path] = nbytes.get(path, 0) + buffer.nbytes

    def _request_transferred(
        self, path: Path, started: int, _: Any, __: Any, buffer: Any, *___: Any
    ) -> None:
        if self._context.mode != OFF:
            spent_ns = time.monotonic_ns() - started
            self._transfers.add(path, buffer.nbytes, spent_ns, spent_ns)

    def _divide_wait(self, reached: int, _: Any, handle: Any, *__: Any) -> None:
        """Divides a wait between the reads and the writes that ended with it, by their bytes."""
        submitted, nbytes_of = self._pending.pop(id(handle), (0, {}))
        if self._context.mode == OFF:
            return
        left_ns = time.monotonic_ns()
        total = sum(nbytes_of.values()) or 1
        for path, nbytes in nbytes_of.items():
            blocked = round((left_ns - reached) * nbytes / total)
            self._transfers.add(path, nbytes, left_ns - submitted, blocked)


def _now_ns(*_: Any, **__: Any) -> int:
    return time.monotonic_ns()
