"""A snapshot of torch's allocator: who holds memory now, and who held it at the peak. Pure.

Bytes by stack are those that the program asked for; the allocator rounds them up. The trace begins with
the oldest event that torch kept, so totals are counted back from the segments of the end.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from zeromon.base.errors import TraceError, os_errors_as
from zeromon.ring.files import open_regular_file
from zeromon.traces.plain_pickle import Shared, load_pickle

# ---- a snapshot of torch's allocator is read -----------------------------------------------------

# A snapshot has the segments of now with their blocks, and a trace of the last allocations and frees.
# The trace is most of the file: its events become a few numbers each while the file is read.

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
        stack = tuple(map(self._place_of_frame, frames)) if isinstance(frames, list) else ()
        number = self._numbers.get(stack)
        if number is None:
            if len(self.stacks) > _MAX_STACKS:
                return UNKNOWN_STACK
            number = self._numbers[stack] = len(self.stacks)
            self.stacks.append(stack)
        if type(frames) is Shared and len(self._shared) < _MAX_STACKS:
            self._shared[id(frames)] = number, frames  # which keeps its id from another list
        return number

    def _place_of_frame(self, frame: Any) -> str:
        cached = self._places.get(id(frame))
        if cached is not None:
            return cached[0]
        fields = frame if isinstance(frame, dict) else {}
        file, name = (str(fields.get(key))[:_MAX_CHARACTERS] for key in ("filename", "name"))
        location = f"{file}:{fields.get('line')}:{name}"
        if len(self._places) < _MAX_STACKS:
            # The frame is kept, too: freed, its id could be that of another frame
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
        # The list is kept, too: freed, its id could be that of another list
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
    # (0, 0) is the default pool, which needs no name
    if any(pool := row.get("segment_pool_id") or ()):
        kind += ", pool " + ".".join(str(int(number)) for number in pool[:2])
    return Segment(int(row.get("device", 0)), kind, int(row["total_size"]), tuple(blocks))


# ---- who holds memory ----------------------------------------------------------------------------

_MAX_OOMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Memory of one stack and role."""

    role: str
    nbytes: int
    count: int
    stack: Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRow:
    """The segments of one kind."""

    kind: str
    count: int
    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int
    """Freed, and in use by another stream."""
    inactive_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment of the trace at which most was allocated."""

    event: int
    events: int
    seconds: float | None
    """Since the first event."""
    nbytes: int
    reserved_bytes: int
    untold_bytes: int
    """Bytes of the totals that no allocation accounts for: 0 in a whole snapshot."""
    held: tuple[Holding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    """An allocation that failed."""

    nbytes: int
    device_free_bytes: int
    allocated_bytes: int
    seconds: float | None
    stack: Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The allocator of one device."""

    device: int
    reserved_bytes: int
    """Bytes that the allocator has from the device."""
    allocated_bytes: int
    """Bytes that the program has from the allocator."""
    segments: tuple[SegmentRow, ...]
    stranded_bytes: int
    """Inactive in segments that something else keeps: the device does not get it back."""
    largest_inactive_bytes: int
    held: tuple[Holding, ...]
    """Now, the most first."""
    peak: Peak | None
    roles: dict[str, dict[str, int]]
    """``now``, and ``peak`` where it is known -> role -> bytes, the most first."""
    ooms: tuple[Oom, ...]


def bytes_by_role(holdings: Iterable[Holding]) -> dict[str, int]:
    """Role -> bytes, the most first."""
    totals: dict[str, int] = defaultdict(int)
    for stack_holding in holdings:
        totals[stack_holding.role] += stack_holding.nbytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def memory_by_device(snapshot: Snapshot) -> tuple[DeviceMemory, ...]:
    """Returns the memory that each device of *snapshot* holds."""
    devices = {segment.device for segment in snapshot.segments} | set(snapshot.traces)
    return tuple(
        _device_memory(
            number,
            [segment for segment in snapshot.segments if segment.device == number],
            snapshot.traces.get(number, Events()),
            snapshot.stacks,
        )
        for number in sorted(devices)
    )


def _device_memory(
    number: int, segments: list[Segment], events: Events, stacks: Sequence[Stack]
) -> DeviceMemory:
    kinds = [kind_of(stack) for stack in stacks]
    active = {b.address: b for segment in segments for b in segment.blocks if b.active}
    idle = [(s, b) for s in segments for b in s.blocks if not b.active]
    rows = _segment_rows(segments)
    holdings = _stack_holdings([(b.requested, b.stack, None) for b in active.values()], kinds, stacks)
    roles = {"now": bytes_by_role(holdings)}
    walk, peak = _Walk(events, active, segments), None
    if ALLOC in events.actions:
        live = _live_allocations_at(walk.most_at, events, active)
        peak = Peak(
            event=walk.most_at,
            events=len(events.actions),
            seconds=_seconds_since_first(events, walk.most_at),
            nbytes=walk.most,
            reserved_bytes=walk.reserved_at_most,
            untold_bytes=walk.most - sum(size for size, _, _ in live),
            held=_stack_holdings(live, kinds, stacks),
        )
        roles["peak"] = bytes_by_role(peak.held)
    return DeviceMemory(
        device=number,
        reserved_bytes=sum(row.reserved_bytes for row in rows),
        allocated_bytes=sum(row.allocated_bytes for row in rows),
        segments=rows,
        stranded_bytes=sum(b.nbytes for s, b in idle if any(o.active for o in s.blocks)),
        largest_inactive_bytes=max((block.nbytes for _, block in idle), default=0),
        held=holdings,
        peak=peak,
        roles=roles,
        ooms=tuple(
            Oom(
                nbytes=events.sizes[at],
                device_free_bytes=events.addresses[at],
                allocated_bytes=allocated,
                seconds=_seconds_since_first(events, at),
                stack=stacks[events.stacks[at]],
            )
            for at, allocated in walk.ooms[-_MAX_OOMS:]
        ),
    )


class _Walk:
    """The totals over a trace: the most that was allocated, and what failed."""

    def __init__(self, events: Events, active: dict[int, Block], segments: list[Segment]) -> None:
        allocated = reserved = peak_bytes = 0
        self.most_at, self.ooms = -1, list[tuple[int, int]]()
        reserved_at_most = 0
        for at, (action, size) in enumerate(zip(events.actions, events.sizes, strict=True)):
            if action == ALLOC:
                allocated += size
                if allocated > peak_bytes:
                    peak_bytes, self.most_at, reserved_at_most = allocated, at, reserved
            elif action == FREE_COMPLETED:
                allocated -= size
            elif action == SEGMENT_GROWS:
                reserved += size
            elif action == SEGMENT_SHRINKS:
                reserved -= size
            elif action == OOM:
                self.ooms.append((at, allocated))
        earlier_bytes = sum(block.requested for block in active.values()) - allocated
        self.most = earlier_bytes + peak_bytes
        self.reserved_at_most = sum(s.nbytes for s in segments) - reserved + reserved_at_most
        self.ooms = [(at, earlier_bytes + at_oom) for at, at_oom in self.ooms]


_Live = tuple[int, int, int | None]
"""(bytes, number of the stack that made it, that of the one that freed it; None: it lives on)."""


def _live_allocations_at(event_number: int, events: Events, active: dict[int, Block]) -> list[_Live]:
    live: dict[int, tuple[int, int]] = {}
    last_made = UNKNOWN_STACK
    rows = zip(events.actions, events.addresses, events.sizes, events.stacks, strict=True)
    for action, address, size, stack in islice(rows, event_number + 1):
        if action == ALLOC:
            last_made = stack
            live[address] = size, stack
        elif action == FREE_COMPLETED:
            live.pop(address, None)
    # The loop below goes on where the first one stopped: both read one iterator
    freed_by: dict[int, int] = {}
    for action, address, size, stack in rows:
        if action == ALLOC:
            last_made = stack
        # The first event of an address ends what lived there at the peak; later ones are of other blocks
        if action in (ALLOC, FREE_REQUESTED, FREE_COMPLETED) and address not in freed_by:
            if action != ALLOC and address not in live:  # it is older than the trace
                live[address] = size, UNKNOWN_STACK
            # without a stack of its own a free has that of its allocation, or none
            is_told = stack and stack != live.get(address, (0, 0))[1]
            freed_by[address] = stack if is_told else last_made
    for address, block in active.items():
        if address not in freed_by and address not in live:
            live[address] = block.requested, block.stack
    return [(size, stack, freed_by.get(address)) for address, (size, stack) in live.items()]


def _stack_holdings(
    live: Iterable[_Live], kinds: Sequence[str], stacks: Sequence[Stack]
) -> tuple[Holding, ...]:
    """Bytes by role and stack, the most first."""
    sums: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for size, made_by, freed in live:
        of = allocation_role(kinds[made_by], None if freed is None else kinds[freed])
        row = sums[of, made_by]
        row[0] += size
        row[1] += 1
    holdings = [
        Holding(role=of, nbytes=nbytes, count=count, stack=stacks[made_by])
        for (of, made_by), (nbytes, count) in sums.items()
    ]
    return tuple(sorted(holdings, key=lambda stack_holding: -stack_holding.nbytes))


def _seconds_since_first(events: Events, at: int) -> float | None:
    """Since the first event; None where torch wrote no times."""
    first_us = next(iter(events.times_us), 0)
    return (events.times_us[max(at, 0)] - first_us) / 1e6 if first_us else None


def _segment_rows(segments: Iterable[Segment]) -> tuple[SegmentRow, ...]:
    by_kind: dict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        by_kind[segment.kind].append(segment)
    rows = []
    for kind, group in by_kind.items():
        blocks = [block for segment in group for block in segment.blocks]
        rows.append(
            SegmentRow(
                kind=kind,
                count=len(group),
                reserved_bytes=sum(segment.nbytes for segment in group),
                allocated_bytes=sum(b.nbytes for b in blocks if b.allocated),
                pending_bytes=sum(b.nbytes for b in blocks if b.active and not b.allocated),
                inactive_bytes=sum(b.nbytes for b in blocks if not b.active),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.reserved_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """How the memory of one stack differs between two snapshots."""

    role: str
    before_bytes: int
    after_bytes: int
    count: int
    """More allocations."""
    stack: Stack


def memory_growers(
    old_holdings: Iterable[Holding], new_holdings: Iterable[Holding]
) -> tuple[Grown, ...]:
    """The stacks of Python that hold another number of bytes now, those that grew most first."""
    sums: dict[tuple[str, Stack], list[int]] = defaultdict(lambda: [0, 0, 0])
    for column, sign, holdings in ((0, -1, old_holdings), (1, 1, new_holdings)):
        for stack_holding in holdings:
            row = sums[stack_holding.role, tuple(telling_frames(stack_holding.stack))]
            row[column] += stack_holding.nbytes
            row[2] += sign * stack_holding.count
    growths = [
        Grown(role=of, before_bytes=old, after_bytes=new, count=count, stack=stack)
        for (of, stack), (old, new, count) in sums.items()
        if old != new
    ]
    return tuple(sorted(growths, key=lambda grown: grown.before_bytes - grown.after_bytes))


# ---- the frames of a stack that tell where it comes from ----------------------------------------

_PYTHON = re.compile(r"\.py:|<[\w ]+>:\d|^/tmp/ipykernel")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|<(?:frozen|string)|^torch/|/torch/")
_PLUMBING = re.compile(
    r":(?:_?_?\w*call_impl|_fn|decorate_context|wrapper|inner)$"
    r"|unwind::unwind|CapturedTraceback::|gather_with_cpp|CachingAllocator|:_start$|__libc_start"
    r"|_?Py(?:Eval|Object|Function|Run)_|core/boxing|/Register|/Redispatch|Modules/main\.c|ceval\.c"
)
_OF_EVERY_CALL = re.compile(r":\d+:(?:\w+ )?(?:c10|at|std|torch::autograd::Node)::")
NO_STACK = "no stack"


def telling_frames(stack: Sequence[str]) -> list[str]:
    """The frames of Python without what passes calls on; without any, those of C++ that tell."""
    frames = [frame for frame in stack if not _PLUMBING.search(frame)]
    python = [frame for frame in frames if _PYTHON.search(frame)]
    return python or [frame for frame in frames if not _OF_EVERY_CALL.search(frame)] or frames


def frame_text(frame: str) -> str:
    """``linear.py:134 forward``."""
    file_name, _, name = frame.partition(":")
    line_number, _, name = name.partition(":")
    file_name = file_name.rpartition("/")[2]
    return name or file_name if file_name in ("", "??") else f"{file_name}:{line_number} {name}"


def stack_origin(stack: Sequence[str], *, own_only: bool = False) -> str:
    """The user's own innermost frame, alone (*own_only*) or with what it called; :data:`NO_STACK`."""
    frames = telling_frames(stack)
    if not frames:
        return NO_STACK
    own_frame = next(
        (frame for frame in frames if _PYTHON.search(frame) and not _LIBRARY.search(frame)), ""
    )
    chosen = (own_frame,) if own_frame and own_only else (own_frame, frames[0])
    phrases = dict.fromkeys(frame_text(frame) for frame in chosen if frame)
    return " from ".join(reversed(phrases))


# ---- what an allocation is for, by the frames that made it and those that freed it --------------

PARAMETER, GRADIENT, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
ACTIVATION, TEMPORARY, COMMUNICATION = "activations", "temporary", "communication buffers"
UNKNOWN = "unknown"
ROLES = PARAMETER, GRADIENT, OPTIMIZER_STATE, ACTIVATION, TEMPORARY, COMMUNICATION, UNKNOWN

_FORWARD, _BACKWARD = "forward", "backward"
_OPTIMIZER, _ZERO_GRAD = "optimizer", "zero_grad"

_OPTIM = r"(?:/optim/|/optimizers?/|deepspeed/ops/(?:adam|lamb|lion|adagrad|muon)/)[^:]*:\d+:"
_MODULES = r"nn/modules/\w+\.py:\d+:"
# The order counts: a frame in optim/ that makes state also fits the rule of the optimizer
_RULES = (
    (_ZERO_GRAD, r":zero_grad$"),
    (OPTIMIZER_STATE, _OPTIM + r"\w*(?:init_group|init_state|initialize_optimizer_states?)$"),
    (_OPTIMIZER, _OPTIM),
    (GRADIENT, r"AccumulateGrad|_fsdp_param\.py:\d+:\w*accumulate\w*grad|zero/.*:\w*grad_partition"),
    (COMMUNICATION, r"nn/parallel/distributed\.py:\d+:_(?!run_ddp)|_fsdp_collectives\.py"
                    r"|distributed_c10d\.py|_functional_collectives\.py|c10d::"
                    r"|:\w*(?:all_?gather|reduce_scatter|allreduce|unsharded|ipg_buffer|bucket)\w*$"
                    r"|ProcessGroup(?:NCCL|Gloo|UCC|XCCL)|deepspeed/comm/|ncclMemAlloc"),
    (PARAMETER, _MODULES + r"(?:__init__|reset_parameters|_apply|convert|to|cuda|to_empty"
                r"|load_state_dict|_load_from_state_dict)$|nn/init\.py:|nn/parameter\.py:|:from_pretrained$"
                r"|_fsdp_param\.py:\d+:_init_sharded_param|_flat_param\.py:\d+:\w*(?:init|flatten)\w*$"
                r"|zero/partition_parameters\.py:"),
    (_BACKWARD, r"autograd::Engine|_engine_run_backward|torch/_tensor\.py:\d+:backward"
                r"|autograd/__init__\.py:\d+:backward"),
    (_FORWARD, _MODULES + r"(?:_\w*call_impl|\w*forward)$|:forward$|nn/functional\.py:"
               r"|utils/checkpoint\.py:"),
)  # fmt: skip
_KINDS = tuple((kind, re.compile(rule)) for kind, rule in _RULES)


@lru_cache(maxsize=1 << 16)
def _kind_of_frame(frame: str) -> str:
    return next((kind for kind, rule in _KINDS if rule.search(frame)), "")


def kind_of(stack: Sequence[str]) -> str:
    """Returns the kind by the innermost frame that shows one; "" where none does."""
    return next((kind for frame in stack if (kind := _kind_of_frame(frame))), "")


def allocation_role(made_by: str, freed_by: str | None) -> str:
    """The role of an allocation by the kinds of its two stacks; *freed_by*: None where it lives on."""
    if made_by in (_BACKWARD, COMMUNICATION) and freed_by == _ZERO_GRAD:
        return GRADIENT
    if made_by == _BACKWARD:
        return TEMPORARY if freed_by == _BACKWARD else GRADIENT
    if made_by == _OPTIMIZER:
        return OPTIMIZER_STATE if freed_by is None else TEMPORARY
    if made_by == _FORWARD:
        return TEMPORARY if freed_by == _FORWARD else ACTIVATION
    return UNKNOWN if made_by in ("", _ZERO_GRAD) else made_by
