"""Why a device is idle, and how far the host is ahead of it. Pure.

A gap is attributed by the event that ends it, as HolisticTraceAnalysis 0.5 does
(``get_idle_time_breakdown``): *host* where the host began to launch that event after the gap had begun;
else *kernels* where the gap is shorter than 30 us, as two kernels in turn have (HTA documents 30 ns and
compares microseconds); else *other*. Of a stream, *other* is divided by the event of another stream that
ended last in the gap: *communication*, *streams* (another kernel or a copy) or none. A gap of the whole
device is time in which no stream has an event.

A *host* gap has the name of what the launching thread was in then: the innermost annotation, as that
of the DataLoader, the outermost operator, or a call of the runtime that blocks.

The queue of a stream (``get_queue_length_time_series``) is what the host has launched and the device has
not begun. HTA's mean weights each change alike; the mean here is over time.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeromon.traces.events import (
    DeviceEvent,
    FlatSpans,
    HostCall,
    Kind,
    Launches,
    Mark,
    Span,
    Stream,
    TraceData,
)  # fmt: skip

GAP_NS = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """Seconds without an event, by cause."""

    host: float = 0.0
    kernels: float = 0.0
    communication: float = 0.0
    streams: float = 0.0
    other: float = 0.0
    unknown: float = 0.0
    """The trace does not have the launch of the event that ends the gap."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.host + self.kernels + self.communication + self.streams + self.other + self.unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTime:
    """One stream of a device, from its first event to its last."""

    device: int
    stream: int
    events: int
    span_seconds: float
    idle: IdleTime
    queue_mean: float | None
    """Over the time from the first launch to the last start; None without launches, as the next."""
    queue_most: int | None
    queue_empty_ratio: float | None
    """Share of that time in which nothing waits: the host is not ahead."""
    delay_seconds: float | None
    """Mean time from the end of the launch to the start of the event."""


def idle_time(data: TraceData) -> tuple[IdleTime | None, tuple[StreamTime, ...]]:
    """The time in which no stream has an event, and the streams, those with the most events first.

    None and () where the trace does not have the launches.
    """
    if not data.launches:
        return None, ()
    ordered = sorted(data.device, key=lambda event: event.start_ns)
    by_stream: dict[Stream, list[DeviceEvent]] = defaultdict(list)
    for event in ordered:
        by_stream[event.stream].append(event)
    event_ends = _Ends(data.device)
    rows = [
        _stream_time(stream, events, data.launches, event_ends) for stream, events in by_stream.items()
    ]
    of_device = _idle_gaps(ordered, data.launches, lambda _begin_ns, _event: "other")
    return of_device, tuple(sorted(rows, key=lambda row: -row.events))


def host_calls_while_idle(data: TraceData, begin_ns: int | None = None) -> Iterator[Mark]:
    """Yields the parts of gaps until the host launches in which the launching thread is in a long call.

    The gaps are those of the whole device; *begin_ns*: there is one from then to the first event.
    """
    calls = {thread: FlatSpans(_telling_calls(spans)) for thread, spans in data.host_calls.items()}
    end_ns = begin_ns
    for event in sorted(data.device, key=lambda event: event.start_ns):
        launch = data.launches.of(event)
        if end_ns is not None and launch is not None and launch.thread in calls:
            until_ns = min(launch.start_ns, event.start_ns)
            for span_start_ns, span_end_ns, name in calls[launch.thread].within(end_ns, until_ns):
                yield Mark(name, span_start_ns, span_end_ns, False)
        end_ns = event.end_ns if end_ns is None else max(end_ns, event.end_ns)


def _telling_calls(calls: Iterable[HostCall]) -> Iterator[Span]:
    """Yields annotations, calls of the runtime, and the outermost ones of operators."""
    covered_ns = -math.inf
    for start_ns, end_ns, name, has_inner in sorted(calls, key=lambda call: (call[0], -call[1])):
        if not has_inner or start_ns >= covered_ns:
            covered_ns = end_ns if has_inner else covered_ns
            yield start_ns, end_ns, name


def _idle_gaps(
    events: Iterable[DeviceEvent], launches: Launches, released_by: Callable[[int, DeviceEvent], str]
) -> IdleTime:
    gaps_ns: Counter[str] = Counter()
    end_ns: int | None = None
    for event in events:
        if end_ns is not None and event.start_ns > end_ns:
            launched = launches.start_ns(event)
            if launched is None:
                cause = "unknown"
            elif launched > end_ns:
                cause = "host"
            elif event.start_ns - end_ns < GAP_NS:
                cause = "kernels"
            else:
                cause = released_by(end_ns, event)
            gaps_ns[cause] += event.start_ns - end_ns
        # An event that ends within a longer one of another stream does not end the work of the device
        if end_ns is None or event.end_ns > end_ns:
            end_ns = event.end_ns
    return IdleTime(**{cause: ns / 1e9 for cause, ns in gaps_ns.items()})


class _Ends:
    """The ends of all events, to find what ended last before another began."""

    def __init__(self, events: Sequence[DeviceEvent]) -> None:
        self._unsorted = events

    @cached_property
    def _events(self) -> list[DeviceEvent]:
        return sorted(self._unsorted, key=lambda event: event.end_ns)

    def cause(self, begin_ns: int, event: DeviceEvent) -> str:
        """Returns the kind of what ended last on another stream, after *begin_ns* and before *event*."""
        at = bisect_right(self._events, event.start_ns, key=lambda candidate: candidate.end_ns) - 1
        while at >= 0 and self._events[at].end_ns > begin_ns:
            if self._events[at].stream != event.stream:
                communicates = self._events[at].kind is Kind.COMMUNICATION
                return "communication" if communicates else "streams"
            at -= 1
        return "other"


def _stream_time(
    stream: Stream, events: Sequence[DeviceEvent], launches: Launches, event_ends: _Ends
) -> StreamTime:
    pairs = [(event, launch) for event in events for launch in (launches.of(event),) if launch]
    starts = [event.start_ns for event, _ in pairs]
    # Clocks of host and device differ a little: an event must not begin before it is launched
    launched = sorted(min(launch.start_ns, event.start_ns) for event, launch in pairs)
    mean, largest, empty = _queue_length_figures(launched, starts)
    delays = sum(max(0, event.start_ns - launch.end_ns) for event, launch in pairs)
    return StreamTime(
        device=stream[0],
        stream=stream[1],
        events=len(events),
        span_seconds=(max(e.end_ns for e in events) - events[0].start_ns) / 1e9,
        idle=_idle_gaps(events, launches, event_ends.cause),
        queue_mean=mean,
        queue_most=largest,
        queue_empty_ratio=empty,
        delay_seconds=delays / len(pairs) / 1e9 if pairs else None,
    )


def _queue_length_figures(
    launched: Sequence[int], starts: Sequence[int]
) -> tuple[float | None, int | None, float | None]:
    """Mean, largest and empty share of a queue; both sorted, as many of each."""
    if not launched or starts[-1] == launched[0]:
        return None, None, None
    span = starts[-1] - launched[0]
    waiting, largest, empty, at, previous = 0, 0, 0, 0, launched[0]
    for start in starts:
        while at < len(launched) and launched[at] <= start:
            empty += 0 if waiting else launched[at] - previous
            previous = launched[at]
            waiting, at = waiting + 1, at + 1
            largest = max(largest, waiting)
        empty += 0 if waiting else start - previous
        waiting, previous = waiting - 1, start
    return (sum(starts) - sum(launched)) / span, largest, empty / span
