"""A device that is simulated by discrete events: streams, events and graph capture on a virtual clock.

``VirtualDevice`` has the interface of the agent's ``Accelerator``. All times are integers of
nanoseconds. A stream runs in order what the host enqueued; each operation starts when the host has
enqueued it, the stream is free, and what it waits for has ended. So its times are known when it is
enqueued, and the host sees a result once its own clock has passed it.

The device keeps the schedule of every stream. ``exposed`` computes from the schedule alone, and from
nothing that the agent measured, for which collectives the compute stream stood still.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

EPOCH_NS = 1_000_000_000
"""What the host's clock shows when a device's shows 0."""


class Broken(Exception):
    """What a real device would answer with an error, or with a capture that is lost."""


class Op:
    """One operation in the schedule of a stream, from when the stream is free for it to its end."""

    def __init__(self, kind: str, ready: int, end: int, target: Any = None) -> None:
        self.kind, self.ready, self.end = kind, ready, end
        self.target = target
        """A collective; or, of a wait between streams, the stream and its number of operations."""


class Stream:
    def __init__(self, device: VirtualDevice, stream_id: int) -> None:
        self.device, self.stream_id, self.device_index = device, stream_id, 0
        self.ops: list[Op] = []
        self.tail = 0
        self.capturing = False

    def run(self, kind: str, duration: int, *, until: int = 0, target: Any = None) -> Op:
        """Enqueues an operation, which takes *duration* and ends at *until* at the earliest."""
        ready = max(self.tail, self.device.now)
        op = Op(kind, ready, max(ready + duration, until), target)
        self.ops.append(op)
        self.tail = op.end
        return op

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or self.device.Event()
        event.record(self)
        return event


class VirtualDevice:
    """The streams, the host's clock and the module functions. ``call_ns``: what a call costs."""

    def __init__(self, streams: int = 4, call_ns: int = 0) -> None:
        self.type = "cuda"
        self.now, self.call_ns = 0, call_ns
        self.streams = [Stream(self, number) for number in range(streams)]
        self.current = self.streams[0]
        self.made = 0
        self.broken = ""
        """Why a capture was lost."""

        class PlainEvent(_Event):
            device = self

        class Event(PlainEvent):
            # the hooks patch the class, so each device has one of its own
            def record(self, stream: Stream | None = None) -> None:
                super().record(stream)

            def wait(self, stream: Stream | None = None) -> None:
                super().wait(stream)

        self.Event, self.PlainEvent = Event, PlainEvent
        self.module = SimpleNamespace(synchronize=lambda: self.synchronize())

    @contextmanager
    def host_clock(self) -> Iterator[None]:
        """The host's clock is that of the program."""
        with patch.object(time, "monotonic_ns", lambda: EPOCH_NS + self.now):
            yield

    # ---- what the agent calls -----------------------------------------------------------------

    def is_initialized(self) -> bool:
        return True

    def current_stream(self) -> Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.current.capturing

    # ---- what a program calls -----------------------------------------------------------------

    @contextmanager
    def stream(self, number: int) -> Iterator[Stream]:
        before, self.current = self.current, self.streams[number]
        try:
            yield self.current
        finally:
            self.current = before

    @contextmanager
    def graph(self) -> Iterator[None]:
        """Captures what the host enqueues on the current stream; nothing of it runs."""
        stream, tail, length = self.current, self.current.tail, len(self.current.ops)
        stream.capturing = True
        try:
            yield
        finally:
            stream.capturing, stream.tail = False, tail
            del stream.ops[length:]

    def synchronize(self) -> None:
        self.now = max([self.now, *(stream.tail for stream in self.streams)])

    @property
    def capturing(self) -> bool:
        return any(stream.capturing for stream in self.streams)

    def fail(self, why: str) -> None:
        self.broken = self.broken or why
        raise Broken(why)


class _Event:
    """An event: where it stands in its stream, and when the stream reaches it."""

    device: VirtualDevice

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.timing = enable_timing
        self.at: int | None = None
        self.captured = False
        self.place: tuple[Stream, int] | None = None
        self.device.made += 1

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.device.current
        self.device.now += self.device.call_ns
        self.at, self.captured = max(stream.tail, self.device.now), stream.capturing
        self.place = stream, len(stream.ops)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self.device.current
        self.device.now += self.device.call_ns
        if self.at is not None and self.captured == stream.capturing:
            stream.run("wait", 0, until=self.at, target=self.place)

    def query(self) -> bool:
        if self.device.capturing:
            self.device.fail("an event was queried during a capture")
        if self.captured:
            self.device.fail("an event of a capture was queried")
        return self.at is not None and self.at <= self.device.now

    def elapsed_time(self, later: _Event) -> float:
        """Milliseconds, as torch gives them."""
        if not (self.timing and later.timing and self.query() and later.query()):
            self.device.fail("an event was read before the device had passed it")
        assert self.at is not None and later.at is not None
        return (later.at - self.at) / 1e6


class Group:
    """A process group: asynchronous collectives run in a stream of its own, which no program sees."""

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.tail = 0

    def issue(
        self, number: int, *, peers: int, duration: int, asynchronous: bool
    ) -> tuple[Work | None, Collective]:
        """Enqueues a collective whose last rank arrives at *peers* ns after this one."""
        stream = self.device.current
        self.device.now += self.device.call_ns
        collective = Collective(number)
        ready = max(stream.tail, self.device.now)
        start = max(ready + peers, self.tail)
        collective.issued, collective.end = ready, start + duration
        if not stream.capturing:
            self.tail = collective.end
        if not asynchronous:
            stream.run("collective", 0, until=collective.end, target=collective)
            return None, collective
        return Work(self.device, collective, captured=stream.capturing), collective


class Collective:
    def __init__(self, number: int) -> None:
        self.number = number
        self.issued = self.end = 0


class Work:
    def __init__(self, device: VirtualDevice, collective: Collective, *, captured: bool) -> None:
        self.device, self.collective, self.captured = device, collective, captured

    def wait(self) -> bool:
        """Makes the current stream wait; the host goes on."""
        self.device.now += self.device.call_ns
        stream = self.device.current
        until = self.collective.end if self.captured == stream.capturing else 0
        stream.run("collective", 0, until=until, target=self.collective)
        return True


def exposed(compute: Stream) -> dict[int, int]:
    """Collective -> how long the compute stream stood still for it, by the schedule.

    Where the compute stream waits for a collective, or runs it itself, it stands still until the end of
    the collective. Where it waits for another stream, only the time counts in which that stream in turn
    stood still for one; while the other stream computes or copies, the wait is for something else.
    """
    found: dict[int, int] = {}
    for op in compute.ops:
        if op.kind != "compute":
            _stood_still(op, op.ready, op.end, found)
    return found


def _stood_still(op: Op, start: int, end: int, found: dict[int, int]) -> None:
    start, end = max(start, op.ready), min(end, op.end)
    if end <= start:
        return
    if op.kind == "collective":
        found[op.target.number] = found.get(op.target.number, 0) + end - start
    elif op.kind == "wait":
        other, length = op.target
        for before in reversed(other.ops[:length]):
            if before.end <= start:
                break
            _stood_still(before, start, end, found)
