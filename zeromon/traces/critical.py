"""The critical path of one step: what each moment of it waited for. Pure.

The path is followed backwards from the end of the step, which is that of the host's annotation or of the
last device event that the step launched. What went before is what ended last of all that had to end, so
the parts add up to the step. The dependencies are those of HolisticTraceAnalysis' critical path:

- a device event begins after its launch began, after the event before it on its stream, and after the
  event of another stream that a ``Stream Wait Event`` of the trace names
- a call that synchronizes (and a copy that ends inside its call) ends after the device event that it
  waits for: the one on the stream or of the event that the trace names, else the last one to end in it
- on a thread of the host one operator follows another

Where the trace has no ``cuda_sync`` events, an event that begins 30 us or more after its launch and
after its stream was free is taken to wait for the event of another stream that ended last before. Where
a thread has no operator, it is taken to wait for the operator of another thread that ended last, as the
script waits for autograd's. HTA looks for the path of the largest sum of durations instead, in which
the time between operators counts nothing.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zeromon.traces.events import GAP_NS, DeviceEvent, FlatSpans, Span, Stream, TraceData, kernel_family

HOST, BETWEEN, LAUNCH, GAP = "host", "between operators", "launch", "kernel to kernel"
NO_OPERATOR = "(no operator)"
_TOP = 20


class Blocking(NamedTuple):
    """A call of the host that may wait for the device."""

    start_ns: int
    end_ns: int
    thread: int
    correlation: int
    is_copy: bool


class Sync(NamedTuple):
    """A synchronization that the profiler recorded: ``cuda_sync``."""

    name: str
    correlation: int
    stream: Stream
    waits_on: Stream
    record: int
    """Correlation of the call that recorded the event that is waited for."""


@dataclass(slots=True)
class HostStep:
    """The work of the host in one step."""

    step: int
    start_ns: int
    end_ns: int
    thread: int = 0
    """The thread of the step's annotation."""
    operators: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    marks: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    calls: list[Blocking] = field(default_factory=list)
    moments: dict[int, int] = field(default_factory=dict)
    """Correlation of a call that records an event or lets a stream wait -> its start."""
    syncs: list[Sync] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPart:
    """A part of the path: all pieces of one kind and name."""

    kind: str
    name: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The critical path of one step."""

    step: int
    seconds: float
    kinds: dict[str, float]
    """Kind -> seconds, the largest first; they add up."""
    parts: tuple[PathPart, ...]
    """By kind and name, the largest first."""
    inferred: int
    """Waits of a stream for another that the trace does not name."""


def critical_path(data: TraceData, host: HostStep) -> CriticalPath:
    """Returns the critical path of a step of *data*."""
    walk = _Walk(data, host)
    walk.run()
    kinds: Counter[str] = Counter()
    for (kind, _), ns in walk.spent.items():
        kinds[kind] += ns
    path_parts = (
        PathPart(kind=kind, name=name, count=walk.counts[kind, name], seconds=ns / 1e9)
        for (kind, name), ns in walk.spent.most_common(_TOP)
    )
    return CriticalPath(
        step=host.step,
        seconds=sum(kinds.values()) / 1e9,
        kinds={kind: ns / 1e9 for kind, ns in kinds.most_common()},
        parts=tuple(path_parts),
        inferred=walk.inferred,
    )


def _last_ended_event(events: Sequence[DeviceEvent], at_ns: int) -> DeviceEvent | None:
    """The last of *events* to end until *at_ns*."""
    at = bisect_right(events, at_ns, key=lambda e: e.end_ns)
    return events[at - 1] if at else None


class _Walk:
    """The way back through a step."""

    def __init__(self, data: TraceData, host: HostStep) -> None:
        self.host, self.launches, self.inferred = host, data.launches, 0
        self.spent: Counter[tuple[str, str]] = Counter()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.families: dict[str, str] = {}
        self.threads = {thread: FlatSpans(spans) for thread, spans in host.operators.items()}
        self.marks = {thread: FlatSpans(spans) for thread, spans in host.marks.items()}
        # In a trace of a host the events are operators, which host.operators has already
        device = () if data.is_of_host else data.device
        self.events = sorted(
            (e for e in device if e.end_ns > host.start_ns and self._launch_ns(e) < host.end_ns),
            key=lambda e: (e.start_ns, e.end_ns),
        )
        self.by_end = sorted(self.events, key=lambda e: e.end_ns)
        self.by_call = {e.correlation: e for e in self.events}
        self.seen: set[DeviceEvent] = set()
        self.before: dict[DeviceEvent, DeviceEvent] = {}
        self.streams: dict[Stream, list[DeviceEvent]] = defaultdict(list)
        for event in self.events:
            stream_events = self.streams[event.stream]
            if stream_events:
                self.before[event] = stream_events[-1]
            stream_events.append(event)
        self.released: dict[DeviceEvent, list[DeviceEvent]] = defaultdict(list)
        for sync in host.syncs:
            self._add_release(sync)
        self.waits: dict[int, list[tuple[Blocking, DeviceEvent]]] = defaultdict(list)
        named = {sync.correlation: sync for sync in host.syncs}
        # By end: the walk goes backwards and takes the last wait of a thread first
        for call in sorted(host.calls, key=lambda call: call.end_ns):
            waited = self._waited_event(call, named.get(call.correlation))
            # Where the event ended outside of the call, the call did not wait for it
            if waited is not None and call.start_ns < waited.end_ns <= call.end_ns:
                self.waits[call.thread].append((call, waited))
        self.at = host.end_ns

    # ---- dependencies ------------------------------------------------------------------------------

    def _recorded_event(self, sync: Sync) -> DeviceEvent | None:
        """The last event that was launched on the stream before the recorded moment."""
        record_ns = self.host.moments.get(sync.record)
        on_stream = self.streams.get(sync.waits_on, [])
        return None if record_ns is None else self._launched(on_stream, record_ns, -1)

    def _launched(self, events: Sequence[DeviceEvent], at_ns: int, step: int) -> DeviceEvent | None:
        """The last event that was launched before *at_ns* (*step* -1), or the first one after (0)."""
        at = bisect_left(events, at_ns, key=self._launch_ns) + step
        return events[at] if 0 <= at < len(events) else None

    def _launch_ns(self, event: DeviceEvent) -> int:
        launched = self.launches.start_ns(event)
        return event.start_ns if launched is None else launched

    def _add_release(self, sync: Sync) -> None:
        wait_ns = self.host.moments.get(sync.correlation)
        source = self._recorded_event(sync)
        if sync.name != "Stream Wait Event" or wait_ns is None or source is None:
            return
        waiting = self._launched(self.streams.get(sync.stream, []), wait_ns, 0)
        if waiting is not None and source.end_ns <= waiting.start_ns:
            self.released[waiting].append(source)

    def _waited_event(self, call: Blocking, sync: Sync | None) -> DeviceEvent | None:
        """The device event that *call* waits for."""
        if call.is_copy:
            return self.by_call.get(call.correlation)
        if sync is not None and sync.name == "Event Sync":
            return self._recorded_event(sync)
        if sync is not None and sync.name == "Stream Sync":
            return _last_ended_event(self.streams.get(sync.stream, ()), call.end_ns)
        return _last_ended_event(self.by_end, call.end_ns)

    # ---- the way -----------------------------------------------------------------------------------

    def run(self) -> None:
        """From the end of the step to its start."""
        last_event = self.by_end[-1] if self.by_end else None
        event: DeviceEvent | None = None
        thread: int | None = self.host.thread
        if last_event is not None and last_event.end_ns >= self.at:
            self.at, event = last_event.end_ns, last_event
        while self.at > self.host.start_ns:
            if event is not None:
                event, thread = self._on_device(event)
            elif thread is not None:
                event, thread = self._on_host(thread)
            else:
                self._go_back_to(self.host.start_ns, "unknown", "launch not recorded")

    def _go_back_to(self, at_ns: int, kind: str, name: str) -> None:
        """Goes back to *at_ns*."""
        # Never forward: a trace that contradicts itself would count time twice, or have no end
        at_ns = max(min(at_ns, self.at), self.host.start_ns)
        if at_ns < self.at:
            self.spent[kind, name] += self.at - at_ns
            self.counts[kind, name] += 1
            self.at = at_ns

    def _on_device(self, event: DeviceEvent) -> tuple[DeviceEvent | None, int | None]:
        if event in self.seen:  # a trace that contradicts itself
            return None, None
        self.seen.add(event)
        name = self.families.setdefault(event.name, kernel_family(event.name))
        self._go_back_to(event.start_ns, event.kind.value, name)
        launch = self.launches.of(event)
        candidates = [*self.released.get(event, ()), *filter(None, [self.before.get(event)])]
        previous = max(candidates, key=lambda e: e.end_ns, default=None)
        free = max(previous.end_ns if previous else 0, launch.start_ns if launch else 0)
        if not self.host.syncs and event.start_ns - free >= GAP_NS:
            last_ended = _last_ended_event(self.by_end, event.start_ns)
            if last_ended is not None and last_ended.end_ns > free:
                previous, self.inferred = last_ended, self.inferred + 1
        if launch is not None and (previous is None or previous.end_ns <= launch.start_ns):
            self._go_back_to(launch.start_ns, LAUNCH, name)
            return None, launch.thread
        if previous is None:
            return None, None
        self._go_back_to(previous.end_ns, GAP, name)
        return previous, None

    def _on_host(self, thread: int) -> tuple[DeviceEvent | None, int | None]:
        """One stretch of a thread: the operator or the gap before the moment, or a wait in it."""
        waits = self.waits.get(thread, [])
        while waits and waits[-1][0].end_ns > self.at:
            waits.pop()
        flat = self.threads.get(thread)
        span = flat.before(self.at) if flat else None
        start = self.host.start_ns if span is None else span[0] if span[1] >= self.at else span[1]
        if waits and waits[-1][0].end_ns > start:
            start = waits[-1][0].end_ns
        if span is None or span[1] < self.at:
            # (end, thread) of the operator of another thread that ended last
            candidates = [
                (flat.ends[at - 1], other_thread)
                for other_thread, flat in self.threads.items()
                for at in (bisect_right(flat.ends, self.at),)
                if other_thread != thread and at and flat.ends[at - 1] > start
            ]
            elsewhere = max(candidates, default=None)
            self._between(thread, start if elsewhere is None else elsewhere[0])
            if elsewhere is not None:
                return None, elsewhere[1]
        elif span is not None:
            self._go_back_to(start, HOST, span[2])
        if waits and waits[-1][0].end_ns == self.at:
            call, waited = waits.pop()
            name = flat.before(call.end_ns) if flat else None
            self._go_back_to(waited.end_ns, HOST, name[2] if name else NO_OPERATOR)
            return waited, None
        return None, thread

    def _between(self, thread: int, start_ns: int) -> None:
        """Time without an operator, by the annotations around it."""
        marks = self.marks.get(thread)
        while self.at > start_ns:
            mark = marks.before(self.at) if marks else None
            if mark is None or mark[1] < self.at:
                end_ns = mark[1] if mark else start_ns
                self._go_back_to(max(end_ns, start_ns), BETWEEN, NO_OPERATOR)
            else:
                self._go_back_to(max(mark[0], start_ns), BETWEEN, mark[2])
