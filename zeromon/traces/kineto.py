"""Reads Kineto traces: from the events of a file to what the analysis needs, in exact nanoseconds."""

import json
import math
import re
import sys
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from zeromon.base.errors import TraceError, os_errors_as
from zeromon.ring.codes import ITEM_BYTES
from zeromon.ring.files import open_regular_file
from zeromon.traces.analysis import OPERATORS, kernel_operation, launching_call, product_of
from zeromon.traces.critical import Blocking, HostStep, Sync
from zeromon.traces.events import (
    MIN_CALL_NS,
    STEP_MARK,
    Call,
    DeviceEvent,
    Kind,
    Launch,
    Mark,
    Product,
    Stream,
    TraceData,
    classify_event,
    classify_on_host,
)

# ---- the events of a file, one by one ------------------------------------------------------------

# The events of a trace are one long list of JSON objects. The reader splits the list between objects
# into chunks and decodes each chunk into typed records, so memory depends on the kept events, not on the
# size of the file. A truncated file yields its complete events. What profilers write and strict JSON
# forbids (NaN, bytes that are not UTF-8, control characters) is corrected; an event that cannot be read
# is skipped and counted. The first two bytes identify gzip.

_CHUNK = 1 << 20
_MAX_BYTES = 64 << 20
"""Max bytes of what precedes the events, and of an event."""
_REACH = 1 << 16
"""A boundary between events is found again in as many bytes before the newest ones."""
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|s|bp)")')
_GAP = re.compile(r"[\s,]*")
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]{0,4096}?"rank"\s*:\s*(\d{1,9})(?!\d)')
_DEVICE_NAME = re.compile(
    rb'"deviceProperties"\s*:\s*\[\s*\{[^{}]{0,999}?"name"\s*:\s*"([^"\\]{1,200})"'
    rb'[^{}]{0,999}?"totalGlobalMem"\s*:\s*(\d{1,18})'
)
_NOT_FINITE = re.compile(rb"([:\[,]\s*)-?(?:nan|inf(?:inity)?)(?=\s*[,}\]])", re.IGNORECASE)
_NO_CONTROL = bytes.maketrans(bytes(range(32)), b" " * 32)
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for JSON that it cannot read."""


class Event(msgspec.Struct):
    """An event of the list, of any kind."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: Any = None
    ts: msgspec.Raw = msgspec.Raw(b"")
    dur: msgspec.Raw = msgspec.Raw(b"")
    args: msgspec.Raw = msgspec.Raw(b"")


_OLD_CATEGORIES = {
    "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime",
    "Operator": "cpu_op",
}  # fmt: skip
"""Category as older profilers write it -> as newer ones do."""
_OPERATOR_NAME = re.compile(r"::|Backward\d*$")
_EVENTS = msgspec.json.Decoder(list[Event])
_EVENT = msgspec.json.Decoder(Event)
_VALUES = msgspec.json.Decoder(list[msgspec.Raw])
_SCANNER = json.JSONDecoder(strict=False)


def complete_events(
    path: Path, data: TraceData, on_read: Callable[[int], None] = lambda _: None
) -> Iterator[Event]:
    """Yields the events with a duration (ph X) of the trace in *path*.

    Adds to *data* the numbers of seen and of skipped events, rank and device, and notes on damage.
    *on_read* is called with the number of bytes of the file that were read, again and again.
    """
    with os_errors_as(TraceError, f"read {path}"):
        for chunk in _list_chunks(_read_content(path, data, on_read), data):
            for event in _decode_chunk(chunk, data):
                if not event.ph:
                    data.skipped += 1
                    continue
                data.events_seen += 1
                if event.ph != "X":
                    continue
                if event.cat in _OLD_CATEGORIES:
                    event.cat = _current_category(event)
                yield event


def _current_category(event: Event) -> str:
    """Returns the category of today; older profilers call annotations, as of a step, operators, too."""
    if event.cat == "Operator" and not _OPERATOR_NAME.search(event.name):
        return "user_annotation"
    return _OLD_CATEGORIES[event.cat]


# ---- bytes ----------------------------------------------------------------------------------------


def _read_content(path: Path, data: TraceData, on_read: Callable[[int], None]) -> Iterator[bytes]:
    """Yields the uncompressed content in chunks; notes in *data* a truncated or damaged file."""
    with open_regular_file(path) as file:
        chunk = file.read(_CHUNK)
        if chunk[:2] != b"\x1f\x8b":
            while chunk:
                on_read(len(chunk))
                yield chunk
                chunk = file.read(_CHUNK)
            return
        unpack = zlib.decompressobj(wbits=31)
        while chunk:
            on_read(len(chunk))
            try:
                # Without the limit, a small file of zeros unpacks to gigabytes at once
                unpacked = unpack.decompress(chunk, _CHUNK)
                while unpacked:
                    yield unpacked
                    unpacked = unpack.decompress(unpack.unconsumed_tail, _CHUNK)
            except zlib.error:
                data.notes.append("the gzip data is damaged; zeromon read the events before the damage")
                return
            if unpack.eof and unpack.unused_data[:2] == b"\x1f\x8b":  # concatenated gzip members
                chunk, unpack = unpack.unused_data, zlib.decompressobj(wbits=31)
                # The loop reports these bytes again: without this, the progress passes 100 %
                on_read(-len(chunk))
                continue
            chunk = file.read(_CHUNK)
        if not unpack.eof:
            data.notes.append("the gzip file is truncated; zeromon read its complete events")


def _list_chunks(content: Iterator[bytes], data: TraceData) -> Iterator[bytes]:
    """Yields pieces of the list of events, each a whole number of objects, without the brackets."""
    pending = _skip_list_head(content, data)
    if pending is None:
        return
    searched = 0
    for chunk in content:
        pending += chunk
        # Without the mark, an event of many chunks is searched from its begin at each of them
        begin_at = max(0, searched - _REACH)
        # Cuts after the last object that another object follows
        # Near the end first: a boundary is nearly always there, and the rest need not be searched
        cut, start = 0, max(begin_at, len(pending) - _REACH)
        for boundary in _BETWEEN.finditer(pending, start):
            cut = boundary.start() + 1
        if not cut and start > begin_at:
            for boundary in _BETWEEN.finditer(pending, begin_at):
                cut = boundary.start() + 1
        if cut > 0:
            yield pending[:cut]
            pending = pending[cut:].lstrip(b", \r\n\t")
        elif len(pending) > _MAX_BYTES:
            data.notes.append(
                f"an event is larger than {_MAX_BYTES >> 20} MiB: zeromon read those before"
            )
            return
        searched = 0 if cut > 0 else len(pending)
    # the metadata of the head may also follow the list
    _read_head_facts(pending[-(1 << 16) :], data)
    list_end, is_closed = _end_of_list(pending)
    if not is_closed:
        note = "the file is truncated or its end is damaged; zeromon read its complete events"
        data.notes.append(note)
    yield pending[:list_end]


def _skip_list_head(content: Iterator[bytes], data: TraceData) -> bytes | None:
    """Returns the text after the opening bracket of the events; None without one."""
    head = b""
    for chunk in content:
        searched = max(0, len(head) - _REACH)
        head = (head + chunk).lstrip()
        if head[:1] == b"[":  # the older format consists of the list alone
            return head[1:]
        opening = _LIST.search(head, searched)
        if opening:
            _read_head_facts(head[: opening.start()], data)
            return head[opening.end() :]
        if len(head) > _MAX_BYTES:
            break
    return None


def _read_head_facts(head: bytes, data: TraceData) -> None:
    rank = _RANK.search(head)
    if rank:
        data.rank = int(rank.group(1))
    device = _DEVICE_NAME.search(head)
    if device:
        gib = round(int(device.group(2)) / (1 << 30))
        data.device_name = f"{device.group(1).decode('utf-8', 'replace')} {gib}GB"


def _padded_zero(number: re.Match[bytes]) -> bytes:
    return (number[1] + b"0").ljust(len(number[0]))


def _end_of_list(pending: bytes) -> tuple[int, bool]:
    """Returns the offset of the end of the last event, and whether a bracket closes the list there."""
    # a character a byte, and zeros as long as what they replace: the offsets are those of the bytes
    characters = _NOT_FINITE.sub(_padded_zero, pending).decode("latin-1")
    at = event_end = 0
    while True:
        gap = _GAP.match(characters, at)
        at = gap.end() if gap else at
        if characters[at : at + 1] == "]":
            return event_end, True
        try:
            at = _SCANNER.raw_decode(characters, at)[1]
        except (ValueError, RecursionError):
            boundary = _BETWEEN.search(pending, at)
            if boundary is None:
                return event_end, False
            at = boundary.start() + 1
        event_end = at


# ---- events ---------------------------------------------------------------------------------------


def _decode_chunk(chunk: bytes, data: TraceData) -> Iterator[Event]:
    """Yields the events of one chunk of the list, and counts those that cannot be read as skipped."""
    body = chunk.strip().rstrip(b",")
    if not body:
        return
    # Most chunks are valid: only one that msgspec refuses is decoded event by event
    try:
        yield from _EVENTS.decode(b"[" + body + b"]")
        return
    except UNREADABLE:
        # null for numbers that are not finite, in UTF-8 without control characters
        cleaned = body.translate(_NO_CONTROL).decode("utf-8", "replace").encode()
        repaired = _NOT_FINITE.sub(rb"\1null", cleaned)
    for value in _split_values(repaired):
        event = _decode_event(value)
        if event:
            yield event
        else:
            data.skipped += 1


def _decode_event(value: bytes) -> Event | None:
    try:
        return _EVENT.decode(value)
    except UNREADABLE:
        return None


def _split_values(body: bytes) -> list[bytes]:
    """Returns the values of a list that may have damaged ones."""
    try:
        return [bytes(value) for value in _VALUES.decode(b"[" + body + b"]")]
    except UNREADABLE:
        cuts = [0, *(boundary.start() + 1 for boundary in _BETWEEN.finditer(body)), len(body)]
        objects = (body[start:stop].strip(b", ") for start, stop in pairwise(cuts))
        return [json_object for json_object in objects if json_object]


# ---- what the analysis needs, in exact nanoseconds -----------------------------------------------

_SIGNED = re.compile(r"-?\d{1,18}(\.\d*)?$")
_MAX_DIGITS = 40
"""Max digits of a time stamp: that of the year 10,000 has 21 in nanoseconds."""

_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events"))
_MARKS = frozenset(("gpu_user_annotation", "user_annotation"))
_RUNTIME = ("runtime", "driver")
_LAUNCH = re.compile(r"Launch|[mM]em(?:cpy|set)|job_prep_and_submit")
"""Calls that put work on a device: CUDA, HIP, Level Zero, MTIA."""
_OWN_MARKS = ("enumerate(DataLoader)", "Optimizer.")
"""Marks that say more than the calls in them, of torch's dataloader.py and optimizer.py."""
_NODE = "autograd::engine::evaluate_function: "
_SYNC = "cuda_sync"
_ON_HOST = frozenset(("cpu_op", "user_annotation"))
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


def read_trace(path: Path, on_read: Callable[[int], None] = lambda _: None) -> TraceData:
    """Returns the trace in *path*; raises :class:`TraceError` for a file without trace events.

    A trace without device events is read a second time, for the operators and collectives of the host,
    and so is one with communication kernels of unknown operation, for the calls that launched them.
    *on_read*: called with the number of bytes that were read, again and again; below 0: from the start.
    """
    data, unnamed, streams = TraceData(name=path.name), _Unnamed(), dict[Stream, Stream]()
    products = dict[tuple[str, ...], Product]()
    for event in complete_events(path, data, on_read):
        if event.cat in _DEVICE:
            _keep_device_event(event, data, unnamed, streams)
            continue
        _keep_host_call(event, data)
        if event.cat in _MARKS:
            _keep_profiler_mark(event, data)
        # Each backend has a prefix of its own: cuda_runtime, xpu_runtime, cuda_driver
        elif event.cat.endswith(_RUNTIME):
            _keep_host_launch(event, data)
        elif event.name in OPERATORS:
            _keep_product(event, data, products)
    if not data.events_seen:
        raise TraceError(
            f"{path} holds no trace events",
            hint="It should be a Kineto trace: JSON with traceEvents, as torch.profiler exports it.",
        )
    if data.device and not unnamed:
        return data
    on_read(-path.stat().st_size)
    if not data.device:
        return _read_host_trace(path, on_read)
    _name_by_launch(path, data, unnamed, on_read)
    return data


def _read_host_trace(path: Path, on_read: Callable[[int], None]) -> TraceData:
    data, host = TraceData(name=path.name, is_of_host=True), dict[str, list[DeviceEvent]]()
    waits = dict[str, list[int]]()
    for event in complete_events(path, data, on_read):
        if event.name.startswith(_WAIT):
            waits.setdefault(str(event.tid), []).append(to_nanoseconds(event.ts) or 0)
        _keep_on_host(event, data, host)
    _use_host_events(host, waits, data)
    return data


def _name_by_launch(
    path: Path, data: TraceData, unnamed: _Unnamed, on_read: Callable[[int], None]
) -> None:
    """Gives communication kernels the operation of the host's call around their launch."""
    calls, launches = dict[str, list[Call]](), dict[int, tuple[str, int]]()
    # Other data: those of the first reading have counted these events already
    for event in complete_events(path, TraceData(), on_read):
        start, thread = to_nanoseconds(event.ts), str(event.tid)
        if start is None:
            continue
        if event.cat.endswith(_RUNTIME):
            correlation = _read_event_args(event).correlation
            if isinstance(correlation, int) and correlation in unnamed:
                launches[correlation] = thread, start
        elif event.name.startswith(_CALLS):
            collective = _collective_of_args(_read_event_args(event)) or (event.name, "", 0, 0)
            end_ns = start + (to_nanoseconds(event.dur) or 0)
            calls.setdefault(thread, []).append(Call(start, end_ns, collective))
    for thread_calls in calls.values():
        thread_calls.sort()
    for correlation, (thread, at) in launches.items():
        call = launching_call(calls.get(thread, ()), at)
        if call:
            index = unnamed[correlation]
            data.device[index] = data.device[index]._replace(collective=call.collective)


def read_host_step(
    path: Path, data: TraceData, on_read: Callable[[int], None], step: int | None
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
    matches = [host_step for host_step in steps if step in (None, host_step.step)]
    if not matches:
        lowest = min(host_step.step for host_step in steps)
        highest = max(host_step.step for host_step in steps)
        extent = f"step {lowest}" if lowest == highest else f"steps {lowest} to {highest}"
        raise TraceError(f"{path} has no profiler step {step}", f"It has {extent}.")
    by_length = sorted(matches, key=lambda host_step: host_step.end_ns - host_step.start_ns)
    host = by_length[len(matches) // 2]
    on_read(-path.stat().st_size)
    for event in complete_events(path, TraceData(), on_read):
        if event.cat in _ON_HOST or event.cat == _SYNC or event.cat.endswith(_RUNTIME):
            _keep_of_step(event, data, host)
    return host


def _keep_of_step(event: Event, data: TraceData, host: HostStep) -> None:
    span = _event_span(event)
    if span is None or span[1] - span[0] >= 1 << 63:
        return
    (start_ns, end_ns), thread = span, _thread_number(event, data)
    if event.cat == _SYNC:
        host.syncs.append(_read_sync(event))
    elif start_ns >= host.end_ns or end_ns <= host.start_ns:
        return
    elif event.name == f"ProfilerStep#{host.step}":
        host.thread = thread
    elif event.cat == "user_annotation":
        # A trace has millions of events and few names: uninterned, each event keeps a copy
        host.marks[thread].append((start_ns, end_ns, sys.intern(event.name)))
    else:
        host.operators[thread].append((start_ns, end_ns, sys.intern(event.name)))
        waits = _WAITS.search(event.name)
        if waits:
            correlation = _whole_number(_read_event_args(event).correlation, -1)
            if waits["record"]:
                host.moments[correlation] = start_ns
            else:
                host.calls.append(Blocking(start_ns, end_ns, thread, correlation, bool(waits["copy"])))


def _read_sync(event: Event) -> Sync:
    try:
        args = _SYNCS.decode(event.args)
    except UNREADABLE:
        args = _Sync()
    device = _whole_number(args.device)
    stream = _whole_number(args.stream, -1)
    record = _whole_number(args.record, -1)
    waits_on = device, _whole_number(args.waits_on, -1)
    return Sync(event.name, _whole_number(args.correlation, -1), (device, stream), waits_on, record)


# ---- events ---------------------------------------------------------------------------------------


def _keep_on_host(event: Event, data: TraceData, host: dict[str, list[DeviceEvent]]) -> None:
    """Collects operators, and collectives of a host backend, by thread."""
    if event.cat in _MARKS:
        _keep_profiler_mark(event, data)
    elif event.cat != "cpu_op":
        return
    kind, span = classify_on_host(event.cat, event.name), _event_span(event)
    if kind is not None and span is not None:
        host_event = DeviceEvent(kind, *span, sys.intern(event.name), None)
        host.setdefault(str(event.tid), []).append(host_event)


def _use_host_events(
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
        communication = [e for e in events if e.kind is Kind.COMMUNICATION]
        if communication:
            data.device += communication
            continue
        covered_ns, waiting = -math.inf, [*sorted(waits.get(thread, ())), math.inf]
        for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
            next_wait = waiting[bisect_left(waiting, event.start_ns)]
            # Operators nest: an inner one would count the time of the outer one again
            if event.start_ns >= covered_ns and event.end_ns <= next_wait:
                data.device.append(event)
                covered_ns = event.end_ns


def _keep_device_event(
    event: Event, data: TraceData, unnamed: _Unnamed, streams: dict[Stream, Stream]
) -> None:
    span = _event_span(event)
    if span is None:
        data.skipped += 1
        return
    name_kind = data.kinds.get(event.name)
    if name_kind is None:  # classify each name once
        name_kind = data.kinds[event.name] = (event.name, classify_event(event.cat, event.name))
    name, kind = name_kind
    args = _read_event_args(event)
    correlation = _whole_number(args.correlation, -1)
    stream = _whole_number(args.device), _whole_number(args.stream)
    stream = streams.setdefault(stream, stream)
    communicates = kind is Kind.COMMUNICATION
    collective = _collective_of_args(args) if communicates else None
    device_event = DeviceEvent(kind, *span, name, collective, stream, correlation)
    if communicates and correlation >= 0 and not kernel_operation(device_event):
        unnamed[correlation] = len(data.device)
    data.device.append(device_event)


def _keep_host_call(event: Event, data: TraceData) -> None:
    """Keeps what may say why a device is idle: of millions of events those that are long."""
    if event.cat not in _ON_HOST and not event.cat.endswith(_RUNTIME):
        return
    # The duration first: of most events nothing else has to be parsed
    if (to_nanoseconds(event.dur) or 0) < MIN_CALL_NS or STEP_MARK.match(event.name):
        return
    if (span := _event_span(event)) is not None:
        # Without what follows #, a loader with workers would be another one than without
        name = sys.intern(event.name.removeprefix(_NODE).partition("#")[0].strip() or event.name)
        has_inner = event.cat == "cpu_op" or name.startswith(_OWN_MARKS)
        thread_calls = data.host_calls.setdefault(_thread_number(event, data), [])
        thread_calls.append((*span, name, has_inner))


def _keep_host_launch(event: Event, data: TraceData) -> None:
    if not _LAUNCH.search(event.name):
        return
    correlation, span = _whole_number(_read_event_args(event).correlation, -1), _event_span(event)
    if correlation >= 0 and span is not None:
        data.launches.add(correlation, Launch(*span, _thread_number(event, data)))


def _keep_product(event: Event, data: TraceData, products: dict[tuple[str, ...], Product]) -> None:
    span = _event_span(event)
    if span is None:
        return
    try:
        operands = _OPERANDS.decode(event.args) if event.args else _Operands()
    except UNREADABLE:
        operands = _Operands()
    operand_texts = [
        bytes(operand).decode("utf-8", "replace")
        for operand in (operands.dims, operands.types, operands.values)
    ]
    product = products.get((event.name, *operand_texts))
    if product is None:  # few operators differ in their shapes
        product = products[(event.name, *operand_texts)] = product_of(
            event.name, *map(_decode_operand, operand_texts)
        )
    data.products.setdefault(_thread_number(event, data), []).append((*span, product))


def _decode_operand(operand: str) -> Any:
    try:
        return msgspec.json.decode(operand) if operand else None
    except UNREADABLE:
        return None


def _thread_number(event: Event, data: TraceData) -> int:
    return data.threads.setdefault(str(event.tid), len(data.threads))


def _whole_number(number: Any, otherwise: int = 0) -> int:
    return number if isinstance(number, int) else otherwise


def _read_event_args(event: Event) -> _Args:
    """Returns the arguments of an event; without values where it has none that can be read."""
    try:
        return _ARGS.decode(event.args) if event.args else _NO_ARGS
    except UNREADABLE:
        return _NO_ARGS


def _collective_of_args(args: _Args) -> tuple[str, str, int, int] | None:
    """Returns (operation, group, bytes, group size); None without the name of a collective."""
    if not isinstance(args.collective, str):
        return None
    numel = max(map(_whole_number, (args.in_nelems, args.out_nelems)))
    nbytes = numel * ITEM_BYTES.get(str(args.dtype), 0)
    return args.collective, str(args.group or ""), nbytes, _whole_number(args.group_size)


def _keep_profiler_mark(event: Event, data: TraceData) -> None:
    if not event.name.startswith(("FSDP", "ProfilerStep", "zeromon")):
        return
    if (span := _event_span(event)) is not None:
        data.marks.append(Mark(event.name, *span, event.cat == "gpu_user_annotation"))


def _event_span(event: Event) -> tuple[int, int] | None:
    """When an event begins and ends, in nanoseconds; None where it does not tell, or ends earlier."""
    start, duration = to_nanoseconds(event.ts), to_nanoseconds(event.dur)
    if start is None or duration is None or duration < 0:
        return None
    return start, start + duration


def to_nanoseconds(raw: msgspec.Raw) -> int | None:
    """Returns microseconds in decimal text as nanoseconds, exactly; None for other text.

    A double cannot hold a current time stamp in nanoseconds.
    """
    digits = bytes(raw)
    us, point, ns = digits.partition(b".")
    # The usual forms first: the general ones below take longer, for millions of events
    if us.isdigit() and len(us) < 19:
        if not point:
            return int(us) * 1000
        if len(ns) == 3 and ns.isdigit():
            return int(us + ns)
    if len(digits) > _MAX_DIGITS:
        return None
    stamp = digits.decode("ascii", "replace").strip('"')
    if _SIGNED.match(stamp):
        integer, _, decimals = stamp.partition(".")
        fraction = int((decimals + "000")[:3]) if decimals else 0
        if len(decimals) > 3 and decimals[3] >= "5":
            fraction += 1
        return int(integer) * 1000 + (-fraction if stamp[0] == "-" else fraction)
    try:
        value = Decimal(stamp)
        # an exponent of 1,000,000 is an integer of as many digits
        possible = value.is_finite() and abs(value.adjusted()) < _MAX_DIGITS
        return round(value * 1000) if possible else None
    except ArithmeticError:
        return None
