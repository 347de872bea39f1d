"""Analyses a trace: splits the time of a device into its parts, in exact nanoseconds. Pure.

C, K and M are the unions over all streams of communication, compute and copies. The parts add up:
compute |K| + exposed communication |C - K| + exposed copies |M - K - C| + idle = span, from the start
of the first device event to the end of the last.
"""

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from zeromon.memory.speeds import find_named_device, peak_flops
from zeromon.ring.codes import ITEM_BYTES, Op, operation_by_name
from zeromon.snapshot.communication import busbw, overlap_ratio
from zeromon.snapshot.intervals import Interval, common_set, set_length, subtract_set, union_set
from zeromon.traces.critical import CriticalPath
from zeromon.traces.events import (
    GAP_NS,
    STEP_MARK,
    UNIT_MARK,
    Call,
    DeviceEvent,
    FlatSpans,
    HostCall,
    Kind,
    Launches,
    Mark,
    Product,
    Span,
    Stream,
    TraceData,
    kernel_family,
)  # fmt: skip

# ---- idle time ----------------------------------------------------------------------------------

# Why a device is idle, and how far the host is ahead of it. Pure.
# A gap is attributed by the event that ends it, as HolisticTraceAnalysis 0.5 does
# (``get_idle_time_breakdown``): *host* where the host began to launch that event after the gap had
# begun; else *kernels* where the gap is shorter than 30 us, as two kernels in turn have (HTA
# documents 30 ns and compares microseconds); else *other*. Of a stream, *other* is divided by the
# event of another stream that ended last in the gap: *communication*, *streams* (another kernel or
# a copy) or none. A gap of the whole device is time in which no stream has an event.
# A *host* gap has the name of what the launching thread was in then: the innermost annotation, as
# that of the DataLoader, the outermost operator, or a call of the runtime that blocks.
# The queue of a stream (``get_queue_length_time_series``) is what the host has launched and the
# device has not begun. HTA's mean weights each change alike; the mean here is over time.


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


# ---- the time of a device by activity -----------------------------------------------------------

# ---- matrix products and attention, by shape -----------------------------------------------------

# The profiler records shapes with ``record_shapes=True``. The time of an operator is that of the compute
# kernels that were launched inside it, by the same thread. A product of m x k and k x n has 2 m n k
# FLOPs. Attention has 2 b h q k (d + d_v), half of that with a causal mask, and 2.5 times as many
# backward (Dao 2023, arXiv 2307.08691, section 4.1). Bytes are the least possible: operands are read
# once, results are written once. The roofline (Williams, Waterman, Patterson 2009) is the time that the
# larger of FLOPs by peak and bytes by bandwidth of memory takes.

_MATRICES = {
    "mm": 0, "addmm": 1, "addmm_": 1, "_addmm_activation": 1, "bmm": 0, "baddbmm": 1, "baddbmm_": 1,
    "_scaled_mm": 0,
}  # fmt: skip
"""Operator -> place of the first matrix among its arguments; the second follows."""
_ATTENTION = "_scaled_dot_product_"
ATTENTIONS = {
    "flash_attention": (0, 4), "flash_attention_backward": (1, 11), "efficient_attention": (0, 6),
    "efficient_attention_backward": (1, 11), "cudnn_attention": (0, 6),
    "cudnn_attention_backward": (1, 14),
}  # fmt: skip
"""Operator -> places of the query (key and value follow) and of is_causal."""
OPERATORS = frozenset(
    [f"aten::{name}" for name in _MATRICES] + [f"aten::{_ATTENTION}{name}" for name in ATTENTIONS]
)
_DTYPES = {"float": "float32", "double": "float64", "half": "float16"}
_TF32 = re.compile(r"s1688|tf32|xf32", re.IGNORECASE)
"""Kernels that multiply float32 in TensorFloat-32."""
_DEEPEST_OPERATOR = 4
_MAX_SIZE = 1 << 40
NO_SHAPES = "the trace has no shapes of operators: record_shapes=True"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTime:
    """Totals of one operator with one shape and type."""

    op: str
    shape: str
    """``MxNxK``, with the batch before it; of attention ``BxHxQxKxD``, perhaps with ``causal``."""
    dtype: str
    count: int
    seconds: float
    flops: int | None
    """This and what follows: None with :attr:`unknown`."""
    nbytes: int | None
    peak_flops: float | None
    """FLOP/s of the device in this type; None where it is not known."""
    least_seconds: float | None
    """By the roofline."""
    is_memory_bound: bool | None
    peak_ratio: float | None
    """Achieved FLOP/s by the peak."""
    roofline_ratio: float | None
    """The least possible time by the time."""
    unknown: str = ""


def product_of(name: str, dims: Any, types: Any, values: Any) -> Product:
    """The computation of the operator *name*, by the dimensions, types and values of its arguments."""
    short = name.removeprefix("aten::").removeprefix(_ATTENTION)
    try:
        at = ATTENTIONS[short][0] if short in ATTENTIONS else _MATRICES[short]
        dtype = str(types[at]).rpartition("::")[2]
        item = ITEM_BYTES.get(dtype[:1].upper() + dtype[1:], 0)
        dtype = _DTYPES.get(dtype.lower(), dtype.lower())
        if short in ATTENTIONS:
            return _attention_product(short, dtype, item, dims, values)
        *batch, m, k = dims[at]
        *other_batch, second, n = dims[at + 1]
        if second == k and batch == other_batch and item and _are_plausible_sizes(m, n, k, *batch):
            batch_size, elements = prod(batch), m * k + k * n
            # _scaled_mm reads 8 bits an element, and writes 16
            nbytes = batch_size * (elements * item + m * n * max(item, 2))
            shape = "x".join(map(str, (*batch, m, n, k)))
            return Product(short, shape, dtype, 2 * batch_size * m * n * k, nbytes)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        pass
    return Product(short, "", "", None, 0)


def _are_plausible_sizes(*sizes: Any) -> bool:
    return all(isinstance(size, int) and 0 < size < _MAX_SIZE for size in sizes)


def _attention_product(short: str, dtype: str, item: int, dims: Any, values: Any) -> Product:
    at, causal = ATTENTIONS[short]
    (batch, heads, queries, depth), key, value = dims[at : at + 3]
    keys, wide, is_causal = key[-2], value[-1], {"True": True, "False": False}[values[causal]]
    backward = short.endswith("_backward")
    flops = 2 * batch * heads * queries * keys * (depth + wide)
    flops = flops * (5 if backward else 2) // (4 if is_causal else 2)
    elements = batch * heads * queries * (depth + wide) + prod(key) + prod(value)
    if not item or not _are_plausible_sizes(batch, heads, queries, keys, depth, wide, *key, *value):
        raise ValueError
    shape = "x".join(map(str, (batch, heads, queries, keys, depth))) + " causal" * is_causal
    return Product(short, shape, dtype, flops, elements * item * (2 if backward else 1))


def product_times(data: TraceData) -> tuple[ProductTime, ...]:
    """The products of a trace, those that take the most time first."""
    if not data.products:
        return ()
    names = {event.name for event in data.device}
    tf32 = {name: bool(_TF32.search(name[:400])) for name in names}
    for operators in data.products.values():
        operators.sort(key=lambda operator: operator[0])
    starts = {
        thread: [operator[0] for operator in operators] for thread, operators in data.products.items()
    }
    calls: dict[tuple[int, int], tuple[int, bool]] = {}
    for event in data.device:
        launch = data.launches.of(event) if event.kind is Kind.COMPUTE else None
        if launch is None or launch.thread not in starts:
            continue
        operators = data.products[launch.thread]
        nearest = bisect_right(starts[launch.thread], launch.start_ns) - 1
        # Operators nest: the one that started last may have ended before the launch
        for at in range(nearest, max(-1, nearest - _DEEPEST_OPERATOR), -1):
            if operators[at][1] >= launch.start_ns:
                spent_ns, is_tf32 = calls.get((launch.thread, at), (0, False))
                is_tf32 = is_tf32 or tf32[event.name]
                calls[launch.thread, at] = spent_ns + event.end_ns - event.start_ns, is_tf32
                break
    by_product: dict[tuple[Product, str], list[int]] = defaultdict(list)
    for (thread, at), (spent_ns, is_tf32) in calls.items():
        product = data.products[thread][at][2]
        is_tf32 = is_tf32 and product.dtype == "float32"
        by_product[product, "tf32" if is_tf32 else product.dtype].append(spent_ns)
    rows = [
        _product_row(product, dtype, durations_ns, data.device_name)
        for (product, dtype), durations_ns in by_product.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _product_row(product: Product, dtype: str, durations_ns: list[int], device: str) -> ProductTime:
    count, seconds = len(durations_ns), sum(durations_ns) / 1e9
    peak, unknown = None, NO_SHAPES
    flops = nbytes = least_seconds = bound = None
    if product.flops is not None:
        flops, nbytes = product.flops * count, product.nbytes * count
        of_device, hardware = peak_flops(device, dtype), find_named_device(device)
        if isinstance(of_device, str) or hardware is None:
            unknown = str(of_device)
        elif flops > of_device * seconds:
            unknown = f"faster than {device} is in {dtype}: the kernel computes in another type"
        else:
            peak, unknown = of_device, ""
            least_seconds = max(flops / peak, nbytes / hardware.memory)
            bound = nbytes / hardware.memory > flops / peak
    return ProductTime(
        op=product.op, shape=product.shape, dtype=dtype, count=count, seconds=seconds, flops=flops,
        nbytes=nbytes, peak_flops=peak, least_seconds=least_seconds, is_memory_bound=bound,
        peak_ratio=flops / seconds / peak if flops and peak else None,
        roofline_ratio=None if least_seconds is None else least_seconds / seconds, unknown=unknown,
    )  # fmt: skip


def overall_rates(rows: Sequence[ProductTime]) -> tuple[float | None, float | None, float | None]:
    """FLOP/s, share of the peak and share of the roofline of all *rows* that have them."""
    shaped = [row for row in rows if row.flops is not None and row.seconds]
    rated = [row for row in shaped if row.peak_flops and row.least_seconds is not None]
    seconds, of_rated = (sum(row.seconds for row in subset) for subset in (shaped, rated))
    return (
        sum(row.flops or 0 for row in shaped) / seconds if seconds else None,
        sum((row.flops or 0) / (row.peak_flops or 1) for row in rated) / of_rated if rated else None,
        sum(row.least_seconds or 0.0 for row in rated) / of_rated if rated else None,
    )


# ---- the time of a rank's device -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """Totals of one operation on one process group."""

    op: str
    group: str
    count: int
    seconds: float
    exposed_seconds: float
    nbytes: int
    busbw_bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Totals of the communication of one FSDP unit."""

    unit: str
    count: int
    communication_seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """The parts of one profiler step."""

    step: int
    span_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Totals of all kernels with one name."""

    name: str
    kind: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The analysis of the trace of one rank."""

    rank: int
    file: str
    span_seconds: float | None
    """This and the parts of the span are None where the trace has no events to tell them."""
    compute_seconds: float | None
    communication_seconds: float | None
    exposed_seconds: float | None
    exposed_copy_seconds: float | None
    idle_seconds: float | None
    overlap_ratio: float | None
    """Share of communication that overlaps compute, ``|C and K| / |C|``; None without communication."""
    events: int
    ops: tuple[OpTime, ...]
    units: tuple[UnitTime, ...]
    kernels: tuple[KernelTime, ...]
    """Those that take the most time."""
    families: tuple[KernelTime, ...] = ()
    """The families that take the most time: kernels that differ in tile, types and number."""
    idle: IdleTime | None = None
    """Idle time by cause; None where the trace does not have the host's launches."""
    host_calls: dict[str, float] = field(default_factory=dict)
    """Call or annotation -> seconds of ``idle.host`` in which the launching thread is in it, the largest
    first; without calls under 100 us."""
    streams: tuple[StreamTime, ...] = ()
    products: tuple[ProductTime, ...] = ()
    """Matrix products and attention, by shape; () where the trace has none with their launches."""
    device_name: str = ""
    critical_path: CriticalPath | None = None
    """None unless it was asked for."""
    steps: tuple[StepTime, ...] = ()
    """Profiler steps; empty where the trace has no step annotations."""
    wait_seconds: float | None = None
    """Duration of this rank's collectives beyond the shortest of all ranks; None for a single file."""
    notes: tuple[str, ...] = ()


_TOP = 20


def analyze_trace(data: TraceData, rank: int) -> RankTrace:
    """Returns the analysis of one trace; a trace without device events has only notes."""
    by_kind: dict[Kind, list[Interval]] = {kind: [] for kind in Kind}
    for event in data.device:
        by_kind[event.kind].append((event.start_ns, event.end_ns))
    compute, communication, copies = (union_set(by_kind[kind]) for kind in Kind)
    exposed = subtract_set(communication, compute)
    busy = union_set([*compute, *communication])
    exposed_copies = subtract_set(copies, busy)
    span = max((e.end_ns for e in data.device), default=0)
    span -= min((e.start_ns for e in data.device), default=0)
    idle, streams = idle_time(data)
    notes = list(data.notes)
    if data.skipped:
        notes.append(f"{data.skipped} events could not be read")
    part_ns = set_length(compute), set_length(exposed), set_length(exposed_copies)

    def to_seconds(nanoseconds: int) -> float | None:
        return nanoseconds / 1e9 if data.device else None

    steps = []
    for step, spans in sorted(step_windows(data).items()):
        window = union_set(spans)
        seconds = (
            set_length(common_set(intervals, window)) / 1e9
            for intervals in (compute, communication, exposed)
        )
        steps.append(StepTime(step, set_length(window) / 1e9, *seconds))
    return RankTrace(
        rank=rank,
        file=data.name,
        span_seconds=to_seconds(span),
        compute_seconds=to_seconds(part_ns[0]),
        communication_seconds=to_seconds(set_length(communication)),
        exposed_seconds=to_seconds(part_ns[1]),
        exposed_copy_seconds=to_seconds(part_ns[2]),
        idle_seconds=to_seconds(span - sum(part_ns)),
        overlap_ratio=overlap_ratio(set_length(communication), part_ns[1]),
        events=data.events_seen,
        ops=_operation_times(data, compute),
        units=_unit_times(data, compute, communication),
        steps=tuple(steps),
        kernels=_kernel_times(data.device, str),
        families=_kernel_times(data.device, kernel_family),
        idle=idle,
        host_calls=_host_call_seconds(data),
        streams=streams,
        products=product_times(data),
        device_name=data.device_name,
        notes=tuple(notes),
    )


def _host_call_seconds(data: TraceData) -> dict[str, float]:
    spent_ns = Counter[str]()
    for span in host_calls_while_idle(data):
        spent_ns[span.name] += span.end_ns - span.start_ns
    return {name: ns / 1e9 for name, ns in spent_ns.most_common(_TOP)}


def kernel_operation(event: DeviceEvent) -> Op:
    """Returns the operation of a communication kernel, by its collective, else by its name."""
    of_collective = operation_by_name(event.collective[0]) if event.collective else Op.NONE
    return of_collective or operation_by_name(event.name)


_DEEPEST = 8


def launching_call(calls: Sequence[Call], at_ns: int) -> Call | None:
    """Returns the call around a launch on the same thread, of *calls* sorted by start.

    Calls nest: the innermost one that names its process group wins, else the innermost one that names an
    operation.
    """
    count = bisect_right(calls, at_ns, key=lambda call: call.start_ns)
    enclosing = [
        call
        for call in reversed(calls[max(0, count - _DEEPEST) : count])
        if call.end_ns >= at_ns and operation_by_name(call.collective[0])
    ]
    return next((call for call in enclosing if call.collective[1]), enclosing[0] if enclosing else None)


def operation_and_group(event: DeviceEvent) -> tuple[str, str]:
    """Returns the operation and the group of a communication kernel, "" for an unknown group."""
    named = kernel_operation(event)
    return named.label if named else "unknown", event.collective[1] if event.collective else ""


def _operation_times(data: TraceData, compute: list[Interval]) -> tuple[OpTime, ...]:
    groups: dict[tuple[str, str], list[DeviceEvent]] = defaultdict(list)
    for event in data.device:
        if event.kind is Kind.COMMUNICATION:
            groups[operation_and_group(event)].append(event)
    rows = [_operation_time(op, group, events, compute) for (op, group), events in groups.items()]
    return tuple(sorted(rows, key=lambda row: -row.exposed_seconds))


def _operation_time(op: str, group: str, events: list[DeviceEvent], compute: list[Interval]) -> OpTime:
    spans = union_set((e.start_ns, e.end_ns) for e in events)
    # Calls of unknown size would add time and no bytes, and lower the bandwidth
    sized = [e for e in events if e.collective and e.collective[2]]
    nbytes = sum(e.collective[2] for e in sized if e.collective)
    seconds = sum(e.end_ns - e.start_ns for e in sized) / 1e9
    size = max((e.collective[3] for e in sized if e.collective), default=0)
    return OpTime(
        op=op,
        group=group,
        count=len(events),
        seconds=set_length(spans) / 1e9,
        exposed_seconds=set_length(subtract_set(spans, compute)) / 1e9,
        nbytes=nbytes,
        busbw_bytes_per_second=busbw(kernel_operation(sized[0]), nbytes, seconds, size)
        if sized
        else None,
    )


def _unit_times(
    data: TraceData, compute: list[Interval], communication: list[Interval]
) -> tuple[UnitTime, ...]:
    """Returns the communication of FSDP units, by FSDP's annotations on the device's timeline."""
    spans: dict[str, list[Interval]] = defaultdict(list)
    for mark in data.marks:
        annotation = UNIT_MARK.match(mark.name)
        if annotation and mark.on_device and annotation.group(2):
            spans[annotation.group(2)].append((mark.start_ns, mark.end_ns))
    rows = []
    for unit, marked in spans.items():
        covered = common_set(union_set(marked), communication)
        seconds = (set_length(covered) / 1e9, set_length(subtract_set(covered, compute)) / 1e9)
        rows.append(UnitTime(unit, len(marked), *seconds))
    return tuple(sorted(rows, key=lambda row: -row.exposed_seconds))


def step_windows(data: TraceData) -> dict[int, list[Interval]]:
    """Returns the steps that the profiler marked, on the device's clock.

    The device's own marks count only without launches: where a step ends within another mark of the
    host, as that of ``Optimizer.step``, Kineto gives its kernels to the step before. They also begin at
    a kernel, and so without the wait for the batch.
    """
    border = _device_borders(data)
    on_device = border is None and any(mark.on_device for mark in data.marks)
    windows = defaultdict[int, list[Interval]](list)
    for mark in data.marks:
        match = STEP_MARK.match(mark.name)
        if match and mark.on_device == on_device:
            start_ns, end_ns = mark.start_ns, mark.end_ns
            windows[int(match[1])].append(
                (border(start_ns), border(end_ns)) if border else (start_ns, end_ns)
            )
    return windows


def _device_borders(data: TraceData) -> Callable[[int], int] | None:
    """Returns what tells when the device comes to what the host enqueues at a moment.

    It comes there behind the kernels that were launched before, on the stream with most of them: also
    those of which the launch was before the trace. None where the trace does not have any launch.
    """
    launched = defaultdict[Stream, list[Interval]](list)
    queued_ns = defaultdict[Stream, int](int)
    for event in data.device:
        if event.kind is Kind.COMPUTE:
            launch_ns = data.launches.start_ns(event)
            if launch_ns is not None:
                launched[event.stream].append((launch_ns, event.end_ns))
            else:
                queued_ns[event.stream] = max(queued_ns[event.stream], event.end_ns)
    if not launched:
        return None
    busiest = max(launched, key=lambda stream: len(launched[stream]))
    kernels = sorted(launched[busiest])
    first_end_ns = min(end_ns for _, end_ns in kernels)
    # A kernel that ends later was launched within the trace, which has lost the launch
    before_ns = queued_ns[busiest] if queued_ns[busiest] < first_end_ns else 0
    end_times = list(accumulate((end_ns for _, end_ns in kernels), max, initial=before_ns))
    return lambda host_ns: max(host_ns, end_times[bisect_left(kernels, (host_ns, 0))])


def _kernel_times(device: Sequence[DeviceEvent], called: Callable[[str], str]) -> tuple[KernelTime, ...]:
    names = {name: called(name) for name in {event.name for event in device}}
    totals: dict[tuple[str, Kind], list[int]] = {}
    for event in device:
        row = totals.setdefault((names[event.name], event.kind), [0, 0])
        row[0] += 1
        row[1] += event.end_ns - event.start_ns
    top = sorted(totals.items(), key=lambda item: -item[1][1])[:_TOP]
    return tuple(
        KernelTime(name=name, kind=kind.value, count=count, seconds=total_ns / 1e9)
        for (name, kind), (count, total_ns) in top
    )


Durations: TypeAlias = "dict[tuple[str, str], array[int]]"
"""(operation, group) -> nanoseconds of its collectives, in order."""


def collective_durations(data: TraceData) -> Durations:
    """Returns the durations that :func:`rank_waits` needs of one rank."""
    by_operation: Durations = {}
    events = [e for e in data.device if e.kind is Kind.COMMUNICATION]
    for event in sorted(events, key=lambda e: e.start_ns):
        # array("q") raises for what does not fit 64 bits, as in a damaged trace
        duration = min(event.end_ns - event.start_ns, (1 << 63) - 1)
        by_operation.setdefault(operation_and_group(event), array("q")).append(duration)
    return by_operation


def rank_waits(orders: Sequence[Durations]) -> list[int] | None:
    """Returns by how many nanoseconds each rank's collectives exceed the shortest of all ranks.

    A collective's kernel runs from its rank's arrival to the common end, so the shortest one is the
    transfer and the rest is waiting: no common clock is needed. Collectives are matched by their order
    within an operation and group; None when the ranks do not have the same ones.
    """
    if len(orders) < 2 or any({k: len(v) for k, v in o.items()} !=
                              {k: len(v) for k, v in orders[0].items()} for o in orders):  # fmt: skip
        return None
    totals = [0] * len(orders)
    for key in orders[0]:
        for matched in zip(*(lists[key] for lists in orders), strict=True):
            shortest = min(matched)
            for rank, duration in enumerate(matched):
                totals[rank] += duration - shortest
    return totals


RESULT_FILE = "analysis.json"
"""The file in a capture's folder that holds the result."""


class _Result(msgspec.Struct):
    ranks: list[RankTrace]


_DECODER = msgspec.json.Decoder(_Result)


def encode_analysis_result(ranks: Sequence[RankTrace]) -> bytes:
    """Returns the analysis of *ranks* as JSON."""
    return msgspec.json.encode({"ranks": ranks})


def read_analysis_result(folder: Path) -> list[RankTrace]:
    """Reads the result in a capture's *folder*; [] when it is missing or broken."""
    try:
        return _DECODER.decode((folder / RESULT_FILE).read_bytes()).ranks
    except (OSError, ValueError, RecursionError):
        return []
