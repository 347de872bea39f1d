"""Device timing without ever waiting for the device.

Events come from a pool, are recorded where work is issued and where a stream waits, and are read
only after ``query()`` says that they have passed. On CPU backends nothing here is used.

What the host sees of an NCCL collective is only its enqueueing, so for device work the blocked
time is that of the *compute stream*: the time between its reaching the wait and its leaving it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import torch

from zeromon.events import Flag, Kind, Op, head
from zeromon_agents.recorder import (
    EVENT,
    ISSUED_NS,
    NBYTES,
    PLACE,
    SEQUENCE,
    WORD,
    Entry,
    Recorder,
)

_POOL = 4096
_POLL_AT = 256


class Waited(NamedTuple):
    """A wait whose events may not have passed yet."""

    entries: list[Entry]
    reached: Any
    left: Any
    on_compute_stream: bool


class Stalled(NamedTuple):
    """A stretch of the compute stream between two events, at a unit's boundary."""

    op: Op
    phase: int
    unit: int
    reached: Any
    left: Any


class DeviceTimer:
    """Records and reads device events. *cuda* is ``torch.cuda``, or anything with its interface."""

    def __init__(self, recorder: Recorder, cuda: Any = None) -> None:
        self._recorder = recorder
        self._cuda = cuda if cuda is not None else torch.cuda
        self._free: list[Any] = []
        self._pending: deque[Waited | Stalled] = deque()
        self._compute_stream: Any = None

    def mark_compute_stream(self) -> None:
        """The stream that is current now is where the model computes."""
        if self._cuda.is_initialized():
            self._compute_stream = self._cuda.current_stream()

    def issued(self, entry: Entry) -> None:
        """Marks where *entry*'s collective was issued; not while a graph is being captured."""
        if not self._cuda.is_current_stream_capturing():
            entry[EVENT] = self._mark()

    def reached_wait(self, entries: list[Entry]) -> tuple[list[Entry], Any] | None:
        """The stream is about to wait; None when these entries are not timed on the device."""
        if any(entry[EVENT] is None for entry in entries):
            return None
        if self._cuda.is_current_stream_capturing():
            return None
        return entries, self._mark()

    def left_wait(self, waiting: tuple[list[Entry], Any]) -> None:
        """The wait is behind us in the stream's order."""
        entries, reached = waiting
        here = self._compute_stream is None or self._cuda.current_stream() == self._compute_stream
        self._keep(Waited(entries, reached, self._mark(), here))

    def ran_here(self, entry: Entry) -> None:
        """A synchronous collective that the current stream runs itself: it ends here, in its order."""
        here = self._compute_stream is None or self._cuda.current_stream() == self._compute_stream
        self._keep(Waited([entry], entry[EVENT], self._mark(), here))

    def stall(self, op: Op, wait: Any) -> None:
        """Times *wait*, which makes the current stream wait for a unit's communication."""
        if self._cuda.is_current_stream_capturing():
            wait()
            return
        reached = self._mark()
        wait()
        recorder = self._recorder
        self._keep(Stalled(op, recorder.phase, recorder.unit, reached, self._mark()))

    def poll(self) -> None:
        """Turns every wait whose events have passed into records. Never blocks."""
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
            self.poll()  # a long loop without steps, such as an evaluation
        if len(self._pending) < _POOL:
            self._pending.append(item)

    def _write_done(self, item: Waited) -> None:
        blocked = _nanoseconds(item.reached, item.left) if item.on_compute_stream else 0
        for position, entry in enumerate(item.entries):
            event = entry[EVENT]
            end = entry[ISSUED_NS] + _nanoseconds(event, item.left)
            flags = Flag.DEVICE
            # a stream that did not stand still came after the end: then it is only an upper bound
            if blocked > 2000 or not item.on_compute_stream:
                flags |= Flag.END_KNOWN
            word = head(Kind.DONE, flags=flags) | entry[WORD]
            stood = 0 if position else blocked
            # fmt: off
            self._recorder.ring.write(end, word, entry[PLACE], entry[NBYTES], entry[ISSUED_NS],
                                      stood, entry[SEQUENCE])
            # fmt: on
            if event is not item.reached:
                self._free.append(event)

    def _write_stall(self, item: Stalled) -> None:
        blocked = _nanoseconds(item.reached, item.left)
        # fmt: off
        now = time.monotonic_ns()
        self._recorder.write(now, Kind.STALL, item.op, item.phase, Flag.DEVICE, 0, item.unit,
                             blocked, 0, 0, 0)
        # fmt: on


def _nanoseconds(start: Any, end: Any) -> int:
    return max(0, int(start.elapsed_time(end) * 1e6))
