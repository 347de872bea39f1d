"""A device without hardware: host, streams, events and links on one virtual clock. Pure.

All times are whole nanoseconds. Work is known when it is enqueued, and so is its end: a stream runs its
work in the order of enqueueing, not before the host has enqueued it, and a link carries its transfers
in that order, too. No thread runs and nothing waits, so that a program gives the same times each time.

Exposed communication is read from the schedule: the compute stream is blocked by a collective that it
runs itself or waits for. Where it waits for another stream, only the time counts in which that stream in
turn was blocked by a collective; the rest of the wait was for the other stream's kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple


class Kind(str, Enum):
    """What a stream does."""

    KERNEL = "kernel"
    COLLECTIVE = "collective"
    """It runs a collective, or waits for one that a stream of the process group runs."""
    WAIT = "wait"
    """It waits for an event of another stream."""


class Issue(NamedTuple):
    """A collective, and where it was issued."""

    op: str
    unit: str
    phase: str


class Work(NamedTuple):
    """One entry in the schedule of a stream, from when the stream is free for it to its end."""

    kind: Kind
    ready_ns: int
    start_ns: int
    """Later than *ready_ns* where the link was busy."""
    end_ns: int
    name: str
    issue: Issue | None = None
    """The collective that the stream runs or waits for."""
    other: Stream | None = None
    length: int = 0
    """The stream that is waited for, and how much of its schedule."""


class Link:
    """What transfers share: it carries one at a time, in the order in which they were issued."""

    def __init__(self, latency_ns: float, nanoseconds_per_byte: float) -> None:
        self.latency_ns = latency_ns
        self.nanoseconds_per_byte = nanoseconds_per_byte
        self.free_ns = 0

    def duration_ns(self, nbytes: float) -> int:
        """Returns how long a transfer of *nbytes* takes: latency, and bytes over bandwidth."""
        return round(self.latency_ns + nbytes * self.nanoseconds_per_byte)


class Clock:
    """The time of the host, and its streams."""

    def __init__(self) -> None:
        self.host_ns = 0
        self.phase = ""
        self.unit = ""
        """The unit whose collectives are issued now; "" for none."""
        self.streams: list[Stream] = []
        self.compute = self.stream("compute")
        self.current = self.compute
        self.exposed_ns: dict[Issue, int] = defaultdict(int)

        class BoundEvent(Event):
            clock = self
            # named here, where a tool that patches the class looks for them
            record = Event.record
            wait = Event.wait

        self.Event = BoundEvent

    def forget(self) -> None:
        """Drops the schedules so far: what follows is measured from here. The device must be idle."""
        self.exposed_ns.clear()
        for stream in self.streams:
            stream.schedule.clear()

    def stream(self, name: str = "") -> Stream:
        """Returns a new stream."""
        stream = Stream(self, len(self.streams), name or f"stream {len(self.streams)}")
        self.streams.append(stream)
        return stream

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Makes *stream* the current one; None changes nothing."""
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before

    def delay_host(self, duration_ns: int) -> None:
        """Lets the host be busy, as with launching a kernel."""
        self.host_ns += duration_ns

    def synchronize(self) -> None:
        """Lets the host wait for all streams."""
        self.host_ns = max(stream.ready_ns for stream in self.streams)

    def run(self, name: str, duration_ns: int) -> None:
        """Enqueues a kernel in the current stream."""
        ready = self.current.ready_ns
        self.current.add(Work(Kind.KERNEL, ready, ready, ready + duration_ns, name))

    def transfer(self, op: str, link: Link, nbytes: float, stream: Stream) -> Work:
        """Enqueues a collective in *stream* and returns its entry."""
        ready = stream.ready_ns
        start = max(ready, link.free_ns)
        end = link.free_ns = start + link.duration_ns(nbytes)
        issue = Issue(op, self.unit, self.phase)
        return stream.add(Work(Kind.COLLECTIVE, ready, start, end, op, issue))

    def wait_for(self, collective: Work) -> None:
        """Lets the current stream wait for a *collective* that a stream of its group runs."""
        ready = self.current.ready_ns
        end, name = max(ready, collective.end_ns), collective.name
        self.current.add(Work(Kind.COLLECTIVE, ready, ready, end, name, collective.issue))


class Stream:
    """A queue of a device, with the methods that torch's streams have."""

    device_index, device_type = 0, 0

    def __init__(self, clock: Clock, stream_id: int, name: str) -> None:
        self.clock, self.stream_id, self.name = clock, stream_id, name
        self.free_ns = 0
        """When the work that was enqueued so far ends."""
        self.schedule: list[Work] = []

    @property
    def ready_ns(self) -> int:
        """When work that is enqueued now can begin."""
        return max(self.free_ns, self.clock.host_ns)

    def add(self, work: Work) -> Work:
        """Enqueues *work*; what the compute stream is then blocked by is exposed."""
        self.schedule.append(work)
        self.free_ns = work.end_ns
        if self is self.clock.compute and work.kind is not Kind.KERNEL:
            for issue, duration_ns in blocked_by(work, work.ready_ns, work.end_ns):
                self.clock.exposed_ns[issue] += duration_ns
        return work

    def record_event(self, event: Event | None = None) -> Event:
        """Records *event*, or a new one, after the work that was enqueued so far."""
        event = event or self.clock.Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Lets what follows in this stream wait for *event*."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Lets what follows in this stream wait for the work so far of *stream*."""
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        """Whether the work so far has ended."""
        return self.free_ns <= self.clock.host_ns

    def synchronize(self) -> None:
        """Lets the host wait for the work so far."""
        self.clock.host_ns = self.ready_ns


class Event:
    """A point in a stream, with the methods that torch's events have."""

    clock: Clock

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at_ns: int | None = None
        """When the point is reached; None before it is recorded."""
        self._stream: Stream | None = None
        self._length = 0

    def record(self, stream: Stream | None = None) -> Event:
        """Records the event in *stream*, by default the current one."""
        self._stream = stream or self.clock.current
        self.at_ns, self._length = self._stream.ready_ns, len(self._stream.schedule)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """Lets *stream* wait, by default the current one."""
        if self.at_ns is None:
            return
        stream = stream or self.clock.current
        ready = stream.ready_ns
        end = max(ready, self.at_ns)
        stream.add(Work(Kind.WAIT, ready, ready, end, "", None, self._stream, self._length))

    def query(self) -> bool:
        """Whether the point was reached."""
        return self.at_ns is None or self.at_ns <= self.clock.host_ns

    def elapsed_time(self, later: Event) -> float:
        """Returns the milliseconds from this event to *later*."""
        if self.at_ns is None or later.at_ns is None:
            raise RuntimeError("both events must be recorded before their time is read")
        return (later.at_ns - self.at_ns) / 1e6

    def synchronize(self) -> None:
        """Lets the host wait for the event."""
        self.clock.host_ns = max(self.clock.host_ns, self.at_ns or 0)


def blocked_by(work: Work, start_ns: int, end_ns: int) -> Iterator[tuple[Issue, int]]:
    """The collectives that blocked a stream from *start_ns* to *end_ns*, while in *work*."""
    start_ns, end_ns = max(start_ns, work.ready_ns), min(end_ns, work.end_ns)
    if end_ns <= start_ns:
        return
    if work.issue is not None:
        yield work.issue, end_ns - start_ns
    elif work.other is not None:
        for before in reversed(work.other.schedule[: work.length]):
            if before.end_ns <= start_ns:
                break
            yield from blocked_by(before, start_ns, end_ns)
