"""Reads the events of a Kineto trace from disk, a few megabytes at a time.

The events of a trace are one long list of JSON objects. The reader splits the list between objects into
chunks and decodes each chunk into typed records, so memory depends on the kept events, not on the size
of the file. A truncated file yields its complete events. What profilers write and strict JSON forbids
(NaN, bytes that are not UTF-8, control characters) is mended; an event that cannot be read is skipped
and counted. The first two bytes identify gzip.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from zeromon.base.errors import TraceError, os_errors_as
from zeromon.ring.files import open_regular_file
from zeromon.traces.events import TraceData

_CHUNK = 1 << 20
_MAX_BYTES = 64 << 20
"""Max bytes of what precedes the events, and of an event."""
_REACH = 1 << 16
"""A boundary between events is found again in as many bytes before the newest ones."""
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|s|bp)")')
_GAP = re.compile(r"[\s,]*")
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]{0,4096}?"rank"\s*:\s*(\d{1,9})(?!\d)')
_DEVICE = re.compile(
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
                if event.ph == "X":
                    yield event


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
                unpacked = unpack.decompress(chunk, _CHUNK)
                while unpacked:
                    yield unpacked
                    unpacked = unpack.decompress(unpack.unconsumed_tail, _CHUNK)
            except zlib.error:
                data.notes.append("the gzip data is damaged; zeromon read the events before the damage")
                return
            if unpack.eof and unpack.unused_data[:2] == b"\x1f\x8b":  # concatenated gzip members
                chunk, unpack = unpack.unused_data, zlib.decompressobj(wbits=31)
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
        cut = _last_object_end(pending, max(0, searched - _REACH))
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
    device = _DEVICE.search(head)
    if device:
        gib = round(int(device.group(2)) / (1 << 30))
        data.device_name = f"{device.group(1).decode('utf-8', 'replace')} {gib}GB"


def _last_object_end(pending: bytes, begin_at: int) -> int:
    """Returns the offset after the last object that another object follows, from *begin_at*; else 0."""
    cut, start = 0, max(begin_at, len(pending) - _REACH)
    for boundary in _BETWEEN.finditer(pending, start):
        cut = boundary.start() + 1
    if not cut and start > begin_at:
        for boundary in _BETWEEN.finditer(pending, begin_at):
            cut = boundary.start() + 1
    return cut


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
    try:
        yield from _EVENTS.decode(b"[" + body + b"]")
        return
    except UNREADABLE:
        mended = _mend_json(body)
    for value in _split_values(mended):
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


def _mend_json(body: bytes) -> bytes:
    """Returns *body* with null for numbers that are not finite, in UTF-8 without control characters."""
    cleaned = body.translate(_NO_CONTROL).decode("utf-8", "replace").encode()
    return _NOT_FINITE.sub(rb"\1null", cleaned)


def _split_values(body: bytes) -> list[bytes]:
    """Returns the values of a list that may have damaged ones."""
    try:
        return [bytes(value) for value in _VALUES.decode(b"[" + body + b"]")]
    except UNREADABLE:
        cuts = [0, *(boundary.start() + 1 for boundary in _BETWEEN.finditer(body)), len(body)]
        objects = (body[start:stop].strip(b", ") for start, stop in pairwise(cuts))
        return [json_object for json_object in objects if json_object]
