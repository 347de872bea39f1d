"""Reads Kineto traces: from the events of a file to what the analysis needs, in exact nanoseconds."""

import math
import re
import sys
from bisect import bisect_left
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from zeromon.errors import TraceError
from zeromon.ring.codes import ITEM_BYTES
from zeromon.traces.analysis import launching_call, operation
from zeromon.traces.critical import Blocking, HostStep, Sync
from zeromon.traces.events import (
    STEP_MARK,
    Call,
    DeviceEvent,
    Kind,
    Launch,
    Mark,
    Product,
    Stream,
    TraceData,
    classify,
    classify_on_host,
)
from zeromon.traces.products import OPERATORS, product_of
from zeromon.traces.stream import UNREADABLE, Event, complete_events

_SIGNED = re.compile(r"-?\d{1,18}(\.\d*)?$")
_MOST_DIGITS = 40
"""Max digits of a time stamp: that of the year 10,000 has 21 in nanoseconds."""

_DEVICE = frozenset(
    ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset", "mtia_ccp_events")
)
_MARKS = frozenset(("gpu_user_annotation", "user_annotation"))
_RUNTIME = ("runtime", "Runtime", "driver")
_LAUNCH = re.compile(r"Launch|[mM]em(?:cpy|set)|job_prep_and_submit")
"""Calls that put work on a device: CUDA, HIP, Level Zero, MTIA."""
_SYNC = "cuda_sync"
_ON_HOST = frozenset(("cpu_op", "Operator", "user_annotation"))
_WAITS = re.compile(r"(?P<record>EventRecord|StreamWaitEvent)|Synchronize|(?P<copy>Memcpy)|Free$")
_WAIT = "_c10d_functional::wait_tensor"
_CALLS = ("nccl:", "rccl:", "c10d::", "_c10d_functional::", "record_param_comms")

_Unnamed = dict[int, int]
"""Correlation of a launch -> index of its communication kernel, of which the operation is not known."""


class _Args(msgspec.Struct):
    """The arguments of an event that the analysis needs."""

    collective: Any = msgspec.field(default=None, name="Collective name")
    in_nelems: Any = msgspec.field(default=None, name="In msg nelems")
    out_nelems: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group_size: Any = msgspec.field(default=None, name="Group size")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    correlation: Any = None
    device: Any = None
    stream: Any = None


class _Sync(msgspec.Struct):
    """The arguments of a synchronization."""

    correlation: Any = None
    device: Any = None
    stream: Any = None
    waits_on: Any = msgspec.field(default=None, name="wait_on_stream")
    record: Any = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


class _Operands(msgspec.Struct):
    """The arguments of an operator, as the profiler records them."""

    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")
    values: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Concrete Inputs")


_ARGS = msgspec.json.Decoder(_Args)
_NO_ARGS = _Args()
_OPERANDS = msgspec.json.Decoder(_Operands)
_SYNCS = msgspec.json.Decoder(_Sync)


def read(path: Path, told: Callable[[int], None] = lambda _: None) -> TraceData:
    """Returns the trace in *path*; raises :class:`TraceError` for a file without trace events.

    A trace without device events is read a second time, for the operators and collectives of the host,
    and so is one with communication kernels of unknown operation, for the calls that launched them.
    *told*: called with the number of bytes that were read, again and again; less than 0: from the start.
    """
    data, unnamed, streams = TraceData(name=path.name), _Unnamed(), dict[Stream, Stream]()
    known = dict[tuple[str, ...], Product]()
    for event in complete_events(path, data, told):
        if event.cat in _DEVICE:
            _keep_device(event, data, unnamed, streams)
        elif event.cat in _MARKS:
            _keep_mark(event, data)
        elif event.cat.endswith(_RUNTIME):
            _keep_launch(event, data)
        elif event.name in OPERATORS:
            _keep_product(event, data, known)
    if not data.events_seen:
        raise TraceError(
            f"{path} holds no trace events",
            hint="It should be a Kineto trace: JSON with traceEvents, as torch.profiler exports it.",
        )
    if data.device and not unnamed:
        return data
    told(-path.stat().st_size)
    if not data.device:
        return _read_host(path, told)
    _name_by_launch(path, data, unnamed, told)
    return data


def _read_host(path: Path, told: Callable[[int], None]) -> TraceData:
    data, host = TraceData(name=path.name, is_of_host=True), dict[str, list[DeviceEvent]]()
    waits = dict[str, list[int]]()
    for event in complete_events(path, data, told):
        if event.name.startswith(_WAIT):
            waits.setdefault(str(event.tid), []).append(nanoseconds(event.ts) or 0)
        _keep_on_host(event, data, host)
    _use_host(host, waits, data)
    return data


def _name_by_launch(
    path: Path, data: TraceData, unnamed: _Unnamed, told: Callable[[int], None]
) -> None:
    """Gives communication kernels the operation of the host's call around their launch."""
    calls, launches = dict[str, list[Call]](), dict[int, tuple[str, int]]()
    for event in complete_events(path, TraceData(), told):
        start, thread = nanoseconds(event.ts), str(event.tid)
        if start is None:
            continue
        if event.cat.endswith(_RUNTIME):
            correlation = _args(event).correlation
            if isinstance(correlation, int) and correlation in unnamed:
                launches[correlation] = thread, start
        elif event.name.startswith(_CALLS):
            collective = _collective(_args(event)) or (event.name, "", 0, 0)
            end = start + (nanoseconds(event.dur) or 0)
            calls.setdefault(thread, []).append(Call(start, end, collective))
    for found in calls.values():
        found.sort()
    for correlation, (thread, at) in launches.items():
        call = launching_call(calls.get(thread, ()), at)
        if call:
            index = unnamed[correlation]
            data.device[index] = data.device[index]._replace(collective=call.collective)


def read_step(
    path: Path, data: TraceData, told: Callable[[int], None], step: int | None
) -> HostStep:
    """Returns what the host did in *step* of the trace in *path*, whose *data* were read before.

    Without *step*: in that of the median length. Raises :class:`TraceError` where there is none.
    """
    steps = [
        HostStep(int(match.group(1)), mark.start_ns, mark.end_ns)
        for mark in data.marks for match in (STEP_MARK.match(mark.name),)
        if match and not mark.on_device
    ]  # fmt: skip
    if not steps:
        raise TraceError(f"{path} has no profiler step", "torch.profiler marks them at step().")
    found = [one for one in steps if step in (None, one.step)]
    if not found:
        first, last = min(one.step for one in steps), max(one.step for one in steps)
        known = f"step {first}" if first == last else f"steps {first} to {last}"
        raise TraceError(f"{path} has no profiler step {step}", f"It has {known}.")
    host = sorted(found, key=lambda one: one.end_ns - one.start_ns)[len(found) // 2]
    told(-path.stat().st_size)
    for event in complete_events(path, TraceData(), told):
        if event.cat in _ON_HOST or event.cat == _SYNC or event.cat.endswith(_RUNTIME):
            _keep_of_step(event, data, host)
    return host


def _keep_of_step(event: Event, data: TraceData, host: HostStep) -> None:
    span = _span(event)
    if span is None or span[1] - span[0] >= 1 << 63:
        return
    (start, end), thread = span, _thread(event, data)
    if event.cat == _SYNC:
        host.syncs.append(_sync(event))
    elif start >= host.end_ns or end <= host.start_ns:
        return
    elif event.name == f"ProfilerStep#{host.step}":
        host.thread = thread
    elif event.cat == "user_annotation":
        host.marks[thread].append((start, end, sys.intern(event.name)))
    else:
        host.operators[thread].append((start, end, sys.intern(event.name)))
        waits = _WAITS.search(event.name)
        if waits:
            correlation = _whole(_args(event).correlation, -1)
            if waits["record"]:
                host.moments[correlation] = start
            else:
                host.calls.append(Blocking(start, end, thread, correlation, bool(waits["copy"])))


def _sync(event: Event) -> Sync:
    try:
        args = _SYNCS.decode(event.args)
    except UNREADABLE:
        args = _Sync()
    device, on, record = _whole(args.device), _whole(args.stream, -1), _whole(args.record, -1)
    waits_on = device, _whole(args.waits_on, -1)
    return Sync(event.name, _whole(args.correlation, -1), (device, on), waits_on, record)


# ---- events ---------------------------------------------------------------------------------------


def _keep_on_host(event: Event, data: TraceData, host: dict[str, list[DeviceEvent]]) -> None:
    """Collects operators, and collectives of a host backend, by thread."""
    if event.cat in _MARKS:
        _keep_mark(event, data)
    elif event.cat != "cpu_op":
        return
    kind, span = classify_on_host(event.cat, event.name), _span(event)
    if kind is not None and span is not None:
        kept = DeviceEvent(kind, *span, sys.intern(event.name), None)
        host.setdefault(str(event.tid), []).append(kept)


def _use_host(
    host: dict[str, list[DeviceEvent]], waits: dict[str, list[int]], data: TraceData
) -> None:
    """Adds communication, and the outermost operators of threads without communication, to *data*.

    *waits*: thread -> when it began to wait. An operator of a DTensor waits for the collective of its
    argument; the operators in it count instead.
    """
    if not any(e.kind is Kind.COMMUNICATION for events in host.values() for e in events):
        data.notes.append("no device events: was the trace taken with ProfilerActivity.CUDA?")
        return
    data.notes.append(
        "no device events: the analysis covers the host's operators and gloo's collectives"
    )
    for thread, events in host.items():
        own = [e for e in events if e.kind is Kind.COMMUNICATION]
        if own:
            data.device += own
            continue
        end, waiting = -math.inf, [*sorted(waits.get(thread, ())), math.inf]
        for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
            next_wait = waiting[bisect_left(waiting, event.start_ns)]
            if event.start_ns >= end and event.end_ns <= next_wait:
                data.device.append(event)
                end = event.end_ns


def _keep_device(
    event: Event, data: TraceData, unnamed: _Unnamed, streams: dict[Stream, Stream]
) -> None:
    span = _span(event)
    if span is None:
        data.skipped += 1
        return
    known = data.kinds.get(event.name)
    if known is None:  # classify each name once
        known = data.kinds[event.name] = (event.name, classify(event.cat, event.name))
    name, kind = known
    args = _args(event)
    correlation = _whole(args.correlation, -1)
    stream = _whole(args.device), _whole(args.stream)
    stream = streams.setdefault(stream, stream)
    communicates = kind is Kind.COMMUNICATION
    collective = _collective(args) if communicates else None
    kept = DeviceEvent(kind, *span, name, collective, stream, correlation)
    if communicates and correlation >= 0 and not operation(kept):
        unnamed[correlation] = len(data.device)
    data.device.append(kept)


def _keep_launch(event: Event, data: TraceData) -> None:
    if not _LAUNCH.search(event.name):
        return
    correlation, span = _whole(_args(event).correlation, -1), _span(event)
    if correlation >= 0 and span is not None:
        data.launches.add(correlation, Launch(*span, _thread(event, data)))


def _keep_product(event: Event, data: TraceData, known: dict[tuple[str, ...], Product]) -> None:
    span = _span(event)
    if span is None:
        return
    try:
        operands = _OPERANDS.decode(event.args) if event.args else _Operands()
    except UNREADABLE:
        operands = _Operands()
    texts = [
        bytes(text).decode("utf-8", "replace")
        for text in (operands.dims, operands.types, operands.values)
    ]
    product = known.get((event.name, *texts))
    if product is None:  # few operators differ in their shapes
        product = known[(event.name, *texts)] = product_of(event.name, *map(_value, texts))
    data.products.setdefault(_thread(event, data), []).append((*span, product))


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text else None
    except UNREADABLE:
        return None


def _thread(event: Event, data: TraceData) -> int:
    return data.threads.setdefault(str(event.tid), len(data.threads))


def _whole(number: Any, otherwise: int = 0) -> int:
    return number if isinstance(number, int) else otherwise


def _args(event: Event) -> _Args:
    """Returns the arguments of an event; without values where it has none that can be read."""
    try:
        return _ARGS.decode(event.args) if event.args else _NO_ARGS
    except UNREADABLE:
        return _NO_ARGS


def _collective(args: _Args) -> tuple[str, str, int, int] | None:
    """Returns (operation, group, bytes, group size); None without the name of a collective."""
    if not isinstance(args.collective, str):
        return None
    nbytes = max(map(_whole, (args.in_nelems, args.out_nelems))) * ITEM_BYTES.get(
        str(args.dtype), 0
    )
    return args.collective, str(args.group or ""), nbytes, _whole(args.group_size)


def _keep_mark(event: Event, data: TraceData) -> None:
    if not event.name.startswith(("FSDP", "ProfilerStep", "zeromon")):
        return
    if (span := _span(event)) is not None:
        data.marks.append(Mark(event.name, *span, event.cat == "gpu_user_annotation"))


def _span(event: Event) -> tuple[int, int] | None:
    """When an event begins and ends, in nanoseconds; None where it does not tell, or ends earlier."""
    start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
    if start is None or duration is None or duration < 0:
        return None
    return start, start + duration


def nanoseconds(raw: msgspec.Raw) -> int | None:
    """Returns microseconds in decimal text as nanoseconds, exactly; None for other text.

    A double cannot hold a current time stamp in nanoseconds.
    """
    digits = bytes(raw)
    us, point, ns = digits.partition(b".")
    if us.isdigit() and len(us) < 19:
        if not point:
            return int(us) * 1000
        if len(ns) == 3 and ns.isdigit():
            return int(us + ns)
    if len(digits) > _MOST_DIGITS:
        return None
    text = digits.decode("ascii", "replace").strip('"')
    if _SIGNED.match(text):
        whole, _, part = text.partition(".")
        fraction = int((part + "000")[:3]) if part else 0
        if len(part) > 3 and part[3] >= "5":
            fraction += 1
        return int(whole) * 1000 + (-fraction if text[0] == "-" else fraction)
    try:
        value = Decimal(text)
        # an exponent of 1,000,000 is an integer of as many digits
        possible = value.is_finite() and abs(value.adjusted()) < _MOST_DIGITS
        return round(value * 1000) if possible else None
    except ArithmeticError:
        return None
