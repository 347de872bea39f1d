"""Times device work with events, without waiting for the device.

Events come from a pool. They are recorded where work is issued and where a stream waits, and read only
after ``query()`` returns True. CPU backends do not use this module.

The host sees only the enqueueing of an NCCL collective. So the blocked time of device work is that of
the *compute stream*: the time between reaching the wait and leaving it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import torch

from zeromon.ring.events import Flag, Kind, Op, head
from zeromon_agents.runtime.hook_context import (
    EVENT,
    ISSUED_NS,
    NBYTES,
    PLACE,
    SEQUENCE,
    WORD,
    Entry,
    HookContext,
)

_POOL = 4096
_POLL_AT = 256


class Waited(NamedTuple):
    """A wait whose events may not have completed yet."""

    entries: list[Entry]
    reached: Any
    left: Any
    on_compute_stream: bool


class Stalled(NamedTuple):
    """A stall of the compute stream between two events, at a unit's boundary."""

    op: Op
    phase: int
    unit: int
    reached: Any
    left: Any


class DeviceTimer:
    """Records and reads device events. *cuda* is ``torch.cuda`` or has its interface."""

    def __init__(self, context: HookContext, cuda: Any = None) -> None:
        self._context = context
        self._cuda = cuda if cuda is not None else torch.cuda
        self._free: list[Any] = []
        self._pending: deque[Waited | Stalled] = deque()
        self._compute_stream: Any = None
        for name in ("issued", "reached_wait", "left_wait", "ran_here", "stall"):
            setattr(
                self, name, context.timed(getattr(self, name))
            )  # events cost more than a record

    def mark_compute_stream(self) -> None:
        """Takes the current stream for the one in which the model computes."""
        if self._cuda.is_initialized():
            self._compute_stream = self._cuda.current_stream()

    def issued(self, entry: Entry) -> None:
        """Records an event where *entry*'s collective was issued; none while a graph is captured."""
        if not self._cuda.is_current_stream_capturing():
            entry[EVENT] = self._mark()

    def reached_wait(self, entries: list[Entry]) -> tuple[list[Entry], Any] | None:
        """Records that the stream is about to wait; None where *entries* are not timed on the device."""
        if any(entry[EVENT] is None for entry in entries):
            return None
        if self._cuda.is_current_stream_capturing():
            return None
        return entries, self._mark()

    def left_wait(self, waiting: tuple[list[Entry], Any]) -> None:
        """Records that the stream has left the wait."""
        entries, reached = waiting
        here = self._compute_stream is None or self._cuda.current_stream() == self._compute_stream
        self._keep(Waited(entries, reached, self._mark(), here))

    def ran_here(self, entry: Entry) -> None:
        """Records the end of a synchronous collective that the current stream runs itself."""
        here = self._compute_stream is None or self._cuda.current_stream() == self._compute_stream
        self._keep(Waited([entry], entry[EVENT], self._mark(), here))

    def stall(self, op: Op, wait: Any) -> None:
        """Runs and times *wait*, which makes the current stream wait for a unit's communication."""
        if self._cuda.is_current_stream_capturing():
            wait()
            return
        reached = self._mark()
        wait()
        context = self._context
        self._keep(Stalled(op, context.phase, context.unit, reached, self._mark()))

    def poll(self) -> None:
        """Writes a record of every wait whose events have completed. Never blocks."""
        pending = self._pending
        while pending and pending[0].left.query():
            item = pending.popleft()
            if isinstance(item, Waited):
                self._write_done(item)
            else:
                self._write_stall(item)
            self._free.extend((item.reached, item.left))

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def _keep(self, item: Waited | Stalled) -> None:
        if len(self._pending) >= _POLL_AT:
            self.poll()  # no step has polled for long, as in an evaluation
        if len(self._pending) < _POOL:
            self._pending.append(item)

    def _write_done(self, item: Waited) -> None:
        blocked = _nanoseconds(item.reached, item.left) if item.on_compute_stream else 0
        for position, entry in enumerate(item.entries):
            event = entry[EVENT]
            end = entry[ISSUED_NS] + _nanoseconds(event, item.left)
            flags = Flag.DEVICE
            # a stream that did not stall came after the end, which is then only an upper bound
            if blocked > 2000 or not item.on_compute_stream:
                flags |= Flag.END_KNOWN
            word = head(Kind.DONE, flags=flags) | entry[WORD]
            stalled = 0 if position else blocked
            # fmt: off
            self._context.ring.write(end, word, entry[PLACE], entry[NBYTES], entry[ISSUED_NS],
                                     stalled, entry[SEQUENCE])
            # fmt: on
            if event is not item.reached:
                self._free.append(event)

    def _write_stall(self, item: Stalled) -> None:
        blocked = _nanoseconds(item.reached, item.left)
        # fmt: off
        now = time.monotonic_ns()
        self._context.write(now, Kind.STALL, item.op, item.phase, Flag.DEVICE, 0, item.unit,
                             blocked, 0, 0, 0)
        # fmt: on


def _nanoseconds(start: Any, end: Any) -> int:
    return max(0, int(start.elapsed_time(end) * 1e6))
