"""What offloading moves: bytes and time between device, host and disk, added up for each step.

DeepSpeed keeps no such counters. To the disk everything goes through the handle of its asynchronous
I/O operator, so its class is the one point to watch; between device and host the copies are made in
a few methods, which :mod:`.deepspeed` wraps and reports here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from zeromon.events import Kind, Path
from zeromon_agents.guard import Guard
from zeromon_agents.imports import ImportWatch
from zeromon_agents.patches import Patches
from zeromon_agents.recorder import OFF, Recorder

BUILDERS = "deepspeed.ops.op_builder.builder"
_OPERATORS = {"async_io": "aio_handle", "gds": "gds_handle"}


class Transfers:
    """Adds up what is moved and writes one record a path and step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._sums: dict[Path, list[int]] = {}

    def add(self, path: Path, nbytes: int, busy_ns: int = 0, blocked_ns: int = 0) -> None:
        """*nbytes* went along *path*; times in nanoseconds, 0 where they are not known."""
        row = self._sums.get(path)
        if row is None:
            row = self._sums[path] = [0, 0, 0, 0]
        row[0] += nbytes
        row[1] += busy_ns
        row[2] += blocked_ns
        row[3] += 1

    def flush(self) -> None:
        """At the end of a step."""
        now = time.monotonic_ns()
        for path, (nbytes, busy, blocked, calls) in self._sums.items():
            # fmt: off
            self._recorder.write(now, Kind.TRANSFER, path, 0, 0, 0, 0, nbytes, busy, blocked, calls)
            # fmt: on
        self._sums.clear()


class Disk:
    """The hooks on the handles of DeepSpeed's asynchronous I/O.

    Requests of a handle are under way from the first submission to the return of ``wait``; when the
    wait came late, they had ended before, so the time is an upper bound and the speed a lower one.
    """

    def __init__(self, recorder: Recorder, transfers: Transfers, patches: Patches) -> None:
        self._recorder = recorder
        self._transfers = transfers
        self._patches = patches
        self._pending: dict[int, tuple[int, dict[Path, int]]] = {}
        self._watched: set[Any] = set()

    def watch(self, builders: Any) -> None:
        """Patches the operators that are loaded, and ``OpBuilder.load`` for those to come."""
        base = builders.OpBuilder
        original = self._patches.original(base, "load")
        guard = self._recorder.guard

        @functools.wraps(original)
        def load(builder: Any, *args: Any, **kwargs: Any) -> Any:
            module = original(builder, *args, **kwargs)
            try:
                self._watch_operator(builder.name, module)
            except Guard.CAUGHT as error:
                guard.note(error, "OpBuilder.load")
            return module

        self._patches.set(base, "load", load)
        for name, module in getattr(base, "_loaded_ops", {}).items():
            self._watch_operator(name, module)

    def _watch_operator(self, name: str, module: Any) -> None:
        handle = getattr(module, _OPERATORS.get(name, ""), None)
        if handle is None or handle in self._watched:
            return
        self._watched.add(handle)
        for method, path in (("pread", Path.DISK_READ), ("pwrite", Path.DISK_WRITE)):
            self._wrap(handle, f"async_{method}", partial(self._submit_hook, path))
            self._wrap(handle, f"sync_{method}", partial(self._sync_hook, path))
        self._wrap(handle, "wait", self._wait_hook)

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        if name in vars(owner):
            self._patches.set(owner, name, make(self._patches.original(owner, name)))

    def _submit_hook(self, path: Path, original: Any) -> Any:
        recorder, pending, now = self._recorder, self._pending, time.monotonic_ns

        def submit(handle: Any, buffer: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.mode != OFF:
                try:
                    waiting = pending.setdefault(id(handle), (now(), {}))[1]
                    waiting[path] = waiting.get(path, 0) + buffer.nbytes
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, path.label)
            return original(handle, buffer, *args, **kwargs)

        return submit

    def _sync_hook(self, path: Path, original: Any) -> Any:
        recorder, transfers, now = self._recorder, self._transfers, time.monotonic_ns

        def sync(handle: Any, buffer: Any, *args: Any, **kwargs: Any) -> Any:
            started = now()
            try:
                return original(handle, buffer, *args, **kwargs)
            finally:
                if recorder.mode != OFF:
                    try:
                        spent = now() - started
                        transfers.add(path, buffer.nbytes, spent, spent)
                    except Guard.CAUGHT as error:
                        recorder.guard.note(error, path.label)

        return sync

    def _wait_hook(self, original: Any) -> Any:
        recorder, now = self._recorder, time.monotonic_ns

        def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
            reached = now()
            try:
                return original(handle, *args, **kwargs)
            finally:
                try:
                    self._ended(self._pending.pop(id(handle), None), reached, now())
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "aio wait")

        return wait

    def _ended(self, pending: tuple[int, dict[Path, int]] | None, reached: int, left: int) -> None:
        if pending is None or self._recorder.mode == OFF:
            return
        started, waiting = pending
        everything = sum(waiting.values()) or 1
        for path, nbytes in waiting.items():  # reads and writes that end together share the wait
            share = nbytes / everything
            blocked = round((left - reached) * share)
            self._transfers.add(path, nbytes, left - started, blocked)


def watch_disk(imports: ImportWatch, disk: Disk, guarded: Callable[[Any], Any]) -> None:
    """Arms the hooks for when DeepSpeed is imported."""
    imports.when_imported(BUILDERS, guarded(disk.watch))
