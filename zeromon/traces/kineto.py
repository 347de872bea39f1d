"""Reads Kineto traces from disk, a few megabytes at a time, in exact nanoseconds.

The events of a trace are one long list of JSON objects. The reader splits the list between objects into
chunks and decodes each chunk into typed records, so memory depends on the kept events, not on the size
of the file. A truncated file yields its complete events. The first two bytes identify gzip.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec

from zeromon.errors import TraceError
from zeromon.ring.torch_names import ITEM_BYTES
from zeromon.traces.analysis import DeviceEvent, Kind, Mark, TraceData, classify, classify_on_host

_CHUNK = 1 << 20
_MOST_HEAD = 64 << 20
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|s|bp)")')
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d+)')
_SIGNED = re.compile(r"-?\d{1,18}(\.\d*)?$")

_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"))
_MARKS = frozenset(("gpu_user_annotation", "user_annotation"))


class _Args(msgspec.Struct):
    """The arguments of an event that the analysis needs."""

    collective: Any = msgspec.field(default=None, name="Collective name")
    in_nelems: Any = msgspec.field(default=None, name="In msg nelems")
    out_nelems: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group_size: Any = msgspec.field(default=None, name="Group size")
    group: Any = msgspec.field(default=None, name="Process Group Name")


class _Event(msgspec.Struct):
    """An event of the list, of any kind."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: Any = None
    ts: msgspec.Raw = msgspec.Raw(b"")
    dur: msgspec.Raw = msgspec.Raw(b"")
    args: msgspec.Raw = msgspec.Raw(b"")


_EVENTS = msgspec.json.Decoder(list[_Event])
_EVENT = msgspec.json.Decoder(_Event)
_ARGS = msgspec.json.Decoder(_Args)


def read(path: Path) -> TraceData:
    """Returns the trace in *path*; raises :class:`TraceError` for a file without trace events.

    A trace without device events is read a second time, for the operators and collectives of the host.
    """
    data = _read(path, TraceData(name=path.name), _keep)
    if data.events_seen and not data.device:
        host: dict[Any, list[DeviceEvent]] = {}
        data = _read(path, TraceData(name=path.name), lambda e, d: _keep_on_host(e, d, host))
        _use_host(host, data)
    if not data.events_seen:
        raise TraceError(
            f"{path} holds no trace events",
            hint="It should be a Kineto trace: JSON with traceEvents, as torch.profiler exports it.",
        )
    return data


def _read(path: Path, data: TraceData, keep: Callable[[_Event, TraceData], None]) -> TraceData:
    try:
        for chunk in _event_chunks(_content(path, data), data):
            _take(chunk, data, keep)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    return data


# ---- bytes ----------------------------------------------------------------------------------------


def _content(path: Path, data: TraceData) -> Iterator[bytes]:
    """Yields the uncompressed content in chunks; notes in *data* a truncated or damaged file."""
    with path.open("rb") as file:
        first = file.read(_CHUNK)
        if first[:2] != b"\x1f\x8b":
            while first:
                yield first
                first = file.read(_CHUNK)
            return
        unpack = zlib.decompressobj(wbits=31)
        while first:
            try:
                plain = unpack.decompress(first, _CHUNK)
                while plain:
                    yield plain
                    plain = unpack.decompress(unpack.unconsumed_tail, _CHUNK)
            except zlib.error:
                data.notes.append(
                    "the gzip data is damaged; zeromon read the events before the damage"
                )
                return
            if unpack.eof and unpack.unused_data[:2] == b"\x1f\x8b":  # concatenated gzip members
                first, unpack = unpack.unused_data, zlib.decompressobj(wbits=31)
                continue
            first = file.read(_CHUNK)
        if not unpack.eof:
            data.notes.append("the gzip file is truncated; zeromon read its complete events")


def _event_chunks(content: Iterator[bytes], data: TraceData) -> Iterator[bytes]:
    """Yields pieces of the list of events, each a whole number of objects, without the brackets."""
    pending = _skip_head(content, data)
    if pending is None:
        return
    for chunk in content:
        pending += chunk
        cut = _last_cut(pending)
        if cut > 0:
            yield pending[:cut]
            pending = pending[cut:].lstrip(b", \r\n\t")
    # the metadata of the head may also follow the list
    _read_rank(pending[-(1 << 16) :], data)
    end = _end_of_list(pending)
    if end < 0:
        data.notes.append("the file is truncated; zeromon read its complete events")
        cut = _last_cut(pending)
        yield pending[:cut] if cut > 0 else b""
    else:
        yield pending[:end]


def _skip_head(content: Iterator[bytes], data: TraceData) -> bytes | None:
    """Returns the text after the opening bracket of the events; None without one."""
    head = b""
    for chunk in content:
        head += chunk
        if head.lstrip()[:1] == b"[":  # the older format consists of the list alone
            return head.lstrip()[1:]
        opening = _LIST.search(head)
        if opening:
            _read_rank(head[: opening.start()], data)
            return head[opening.end() :]
        if len(head) > _MOST_HEAD:
            break
    return None


def _read_rank(head: bytes, data: TraceData) -> None:
    rank = _RANK.search(head)
    if rank:
        data.rank = int(rank.group(1))


def _last_cut(pending: bytes) -> int:
    """Returns the offset after the last object that another object follows; 0 if there is none."""
    last = 0
    start = max(0, len(pending) - (1 << 16))
    for boundary in _BETWEEN.finditer(pending, start):
        last = boundary.start() + 1
    if not last and start:
        for boundary in _BETWEEN.finditer(pending):
            last = boundary.start() + 1
    return last


def _end_of_list(pending: bytes) -> int:
    """Returns the offset of the end of the last event in the list; -1 for an unclosed list."""
    last = pending.rfind(b"]")
    while last >= 0:
        body = pending[:last].rstrip()
        if (not body or body.endswith(b"}")) and pending[last + 1 :].strip()[:1] in (
            b"",
            b",",
            b"}",
        ):
            with suppress(msgspec.DecodeError):
                msgspec.json.decode(b"[" + body.rstrip(b",") + b"]", type=list[msgspec.Raw])
                return len(body)
        last = pending.rfind(b"]", 0, last)
    return -1


# ---- events ---------------------------------------------------------------------------------------


def _take(chunk: bytes, data: TraceData, keep: Callable[[_Event, TraceData], None]) -> None:
    """Decodes one chunk of the list and passes its complete events (ph X) to *keep*."""
    body = chunk.strip().rstrip(b",")
    if not body:
        return
    try:
        events = _EVENTS.decode(b"[" + body + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError):
        events = list(_one_by_one(body, data))
    data.events_seen += len(events)
    for event in events:
        if event.ph == "X":
            keep(event, data)


def _keep(event: _Event, data: TraceData) -> None:
    if event.cat in _DEVICE:
        _keep_device(event, data)
    elif event.cat in _MARKS:
        _keep_mark(event, data)


def _keep_on_host(event: _Event, data: TraceData, host: dict[Any, list[DeviceEvent]]) -> None:
    """Collects operators, and collectives of a host backend, by thread."""
    if event.cat in _MARKS:
        _keep_mark(event, data)
    elif event.cat != "cpu_op":
        return
    kind = classify_on_host(event.cat, event.name)
    start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
    if kind is None or start is None or duration is None or duration < 0:
        return
    kept = DeviceEvent(kind, start, start + duration, sys.intern(event.name), None)
    host.setdefault(str(event.tid), []).append(kept)


def _use_host(host: dict[Any, list[DeviceEvent]], data: TraceData) -> None:
    """Adds communication, and the outermost operators of threads without communication, to *data*."""
    if not any(e.kind is Kind.COMMUNICATION for events in host.values() for e in events):
        data.notes.append("no device events: was the trace taken with ProfilerActivity.CUDA?")
        return
    data.notes.append(
        "no device events: the analysis covers the host's operators and gloo's collectives"
    )
    for events in host.values():
        own = [e for e in events if e.kind is Kind.COMMUNICATION]
        if own:
            data.device += own
            continue
        end = -(1 << 62)
        for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
            if event.start_ns >= end:
                data.device.append(event)
                end = event.end_ns


def _one_by_one(body: bytes, data: TraceData) -> Iterator[_Event]:
    """Yields the valid objects of a chunk with invalid ones, and counts the invalid ones as skipped."""
    start = 0
    for end in [*(boundary.start() + 1 for boundary in _BETWEEN.finditer(body)), len(body)]:
        text = body[start:end].strip().lstrip(b",")
        start = end
        if not text.strip():
            continue
        try:
            yield _EVENT.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            data.skipped += 1


def _keep_device(event: _Event, data: TraceData) -> None:
    start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
    if start is None or duration is None or duration < 0:
        data.skipped += 1
        return
    known = data.kinds.get(event.name)
    if known is None:  # classify each name once
        known = data.kinds[event.name] = (event.name, classify(event.cat, event.name))
    name, kind = known
    collective = None
    if kind is Kind.COMMUNICATION and event.args:
        with suppress(msgspec.DecodeError):
            collective = _collective(_ARGS.decode(event.args))
    data.device.append(DeviceEvent(kind, start, start + duration, name, collective))


def _collective(args: _Args) -> tuple[str, str, int, int] | None:
    """Returns (operation, group, bytes, group size); None without the name of a collective."""
    if not isinstance(args.collective, str):
        return None
    numbers = [n if isinstance(n, int) else 0 for n in (args.in_nelems, args.out_nelems)]
    size = args.group_size if isinstance(args.group_size, int) else 0
    each = ITEM_BYTES.get(str(args.dtype), 0)
    return args.collective, str(args.group or ""), max(numbers) * each, size


def _keep_mark(event: _Event, data: TraceData) -> None:
    if not event.name.startswith(("FSDP", "ProfilerStep", "zeromon")):
        return
    start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
    if start is not None and duration is not None and duration >= 0:
        on_device = event.cat == "gpu_user_annotation"
        data.marks.append(Mark(event.name, start, start + duration, on_device))


def nanoseconds(raw: msgspec.Raw) -> int | None:
    """Returns microseconds in decimal text as nanoseconds, exactly; None for other text.

    A double cannot hold a current time stamp in nanoseconds.
    """
    digits = bytes(raw)
    if digits.isdigit() and len(digits) < 19:
        return int(digits) * 1000
    text = digits.decode("ascii", "replace").strip('"')
    if _SIGNED.match(text):
        whole, _, part = text.partition(".")
        fraction = int((part + "000")[:3]) if part else 0
        if len(part) > 3 and part[3] >= "5":
            fraction += 1
        return int(whole) * 1000 + (-fraction if text[0] == "-" else fraction)
    try:
        value = Decimal(text) * 1000
        return round(value) if value.is_finite() else None
    except (InvalidOperation, ValueError):
        return None
