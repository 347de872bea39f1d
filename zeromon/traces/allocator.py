"""Reads snapshots of torch's CUDA allocator: ``torch.cuda.memory._dump_snapshot`` and ``_snapshot``.

A snapshot has the segments of now with their blocks, and a trace of the last allocations and frees. The
trace is most of the file: its events become a few numbers each while the file is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeromon.base.errors import TraceError, os_errors_as
from zeromon.ring.files import open_regular_file
from zeromon.traces.plain_pickle import Shared, load_pickle

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_GROWS, SEGMENT_SHRINKS, OOM = range(1, 7)
_ACTIONS = {
    "alloc": ALLOC, "free_requested": FREE_REQUESTED, "free_completed": FREE_COMPLETED,
    "segment_alloc": SEGMENT_GROWS, "segment_map": SEGMENT_GROWS, "segment_free": SEGMENT_SHRINKS,
    "segment_unmap": SEGMENT_SHRINKS, "oom": OOM,
}  # fmt: skip
UNKNOWN_STACK = 0
_MAX_STACKS = 200_000
_MAX_CHARACTERS = 300
_HINT = "It writes snapshots: torch.cuda.memory._record_memory_history(), _dump_snapshot(FILE)."

Stack = tuple[str, ...]
"""``file:line:function``, the innermost first."""


class Stacks:
    """Each stack of a file once, by its number."""

    def __init__(self) -> None:
        self.stacks: list[Stack] = [()]
        self._numbers: dict[Stack, int] = {(): UNKNOWN_STACK}
        self._places: dict[int, tuple[str, Any]] = {}
        self._shared: dict[int, tuple[int, Any]] = {}

    def number(self, frames: Any) -> int:
        """The number of a stack; :data:`UNKNOWN_STACK` for an empty one, and beyond a limit."""
        shared = self._shared.get(id(frames))
        if shared is not None:
            return shared[0]
        stack = tuple(map(self._place, frames)) if isinstance(frames, list) else ()
        number = self._numbers.get(stack)
        if number is None:
            if len(self.stacks) > _MAX_STACKS:
                return UNKNOWN_STACK
            number = self._numbers[stack] = len(self.stacks)
            self.stacks.append(stack)
        if type(frames) is Shared and len(self._shared) < _MAX_STACKS:
            self._shared[id(frames)] = number, frames  # which keeps its id from another list
        return number

    def _place(self, frame: Any) -> str:
        cached = self._places.get(id(frame))
        if cached is not None:
            return cached[0]
        fields = frame if isinstance(frame, dict) else {}
        file, name = (str(fields.get(key))[:_MAX_CHARACTERS] for key in ("filename", "name"))
        location = f"{file}:{fields.get('line')}:{name}"
        if len(self._places) < _MAX_STACKS:
            self._places[id(frame)] = location, frame
        return location


@dataclass(slots=True)
class Events:
    """The trace of one device, oldest first: a number a column and event."""

    actions: array[int] = field(default_factory=lambda: array("B"))
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    """Addresses; for an OOM, the bytes that the device had free."""
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    stacks: array[int] = field(default_factory=lambda: array("I"))
    times_us: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, items: list[dict[str, Any]], number: Callable[[Any], int]) -> None:
        """Adds events as torch writes them."""
        self.actions.extend([_ACTIONS.get(item["action"], 0) for item in items])
        self.addresses.extend([item.get("addr", item.get("device_free", 0)) for item in items])
        self.sizes.extend([item.get("size", 0) for item in items])
        self.stacks.extend([number(item.get("frames")) for item in items])
        self.times_us.extend([item.get("time_us", 0) for item in items])


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment."""

    address: int
    nbytes: int
    requested: int
    active: bool
    allocated: bool
    """Not for one that is freed and still in use by another stream."""
    stack: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that the allocator has from the device."""

    device: int
    kind: str
    nbytes: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of a file."""

    segments: tuple[Segment, ...]
    traces: dict[int, Events]
    """Device -> its events; without devices that have none."""
    stacks: list[Stack]


def read_snapshot(path: Path, on_read: Callable[[int], None] = lambda _: None) -> Snapshot:
    """Reads a file in pieces; raises :class:`TraceError` for any other file.

    *on_read* is called with the number of bytes that were read, again and again.
    """
    stacks, traces = Stacks(), dict[int, tuple[list[Any], Events]]()

    def take_trace_events(owner: list[Any], items: list[Any]) -> bool:
        if type(items[0]) is not dict or "action" not in items[0]:
            return False
        _, events = traces.setdefault(id(owner), (owner, Events()))
        events.add(items, stacks.number)
        return True

    with os_errors_as(TraceError, f"read {path}"), open_regular_file(path) as file:

        def read_bytes(max_bytes: int) -> bytes:
            data = file.read(max_bytes)
            on_read(len(data))
            return data

        content = load_pickle(read_bytes, path.name, take_trace_events)
    if isinstance(content, list):  # _snapshot()["segments"]
        content = {"segments": content}
    try:
        if "segments" not in content:
            raise KeyError
        devices = enumerate(content.get("device_traces") or ())
        return Snapshot(
            tuple(_read_segment(row, stacks) for row in content["segments"]),
            {
                n: traces[id(device_trace)][1]
                for n, device_trace in devices
                if id(device_trace) in traces
            },
            stacks.stacks,
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        raise TraceError(f"{path} is no snapshot of torch's memory", _HINT) from None


def _read_segment(row: dict[str, Any], stacks: Stacks) -> Segment:
    blocks, at = [], int(row["address"])
    for block in row["blocks"]:
        state, nbytes = block["state"], int(block["size"])
        blocks.append(
            Block(
                address=int(block.get("address", at)),
                nbytes=nbytes,
                requested=int(block.get("requested_size", nbytes)),
                active=state != "inactive",
                allocated=state == "active_allocated",
                stack=stacks.number(block.get("frames")),
            )
        )
        at += nbytes
    kind = str(row.get("segment_type", ""))[:_MAX_CHARACTERS]
    if any(pool := row.get("segment_pool_id") or ()):
        kind += ", pool " + ".".join(str(int(number)) for number in pool[:2])
    return Segment(int(row.get("device", 0)), kind, int(row["total_size"]), tuple(blocks))
