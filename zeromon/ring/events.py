"""The records that travel from a training process to the collector, and their 64-byte layout.

A hook writes a record with one ``struct`` call and another process reads it, so the layout is fixed:
little-endian, eight 64-bit words, a sequence number at both ends.

====  =====  ==============================================================
word  field  meaning
====  =====  ==============================================================
0     seq    sequence number, starts at 1; written first, checked last
1     t_ns   CLOCK_MONOTONIC of the event (its end, where it has a duration)
2     kind, op, phase, flags (1 byte each), group, unit (2 bytes each)
3-6   a-d    four signed integers whose meaning depends on *kind*
7     low 32 bits of seq, written last and checked first; CRC
====  =====  ==============================================================

``crc`` is used only where the header asks for it (see :mod:`zeromon.ring.buffer`). Sizes are bytes,
times are nanoseconds; CLOCK_MONOTONIC is one clock for all processes of a node. Nothing here reads a
clock or touches a file.

To add a record: add its number to :class:`Kind`, declare its class here with :func:`declare_record`, and
fold it in :mod:`zeromon.fold` with a function marked ``@folds_event(TheClass)``.
"""

import re
import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from zeromon.ring.codes import (
    Activity,
    ExitKind,
    Flag,
    Kind,
    Op,
    Outcome,
    Padding,
    Path,
    Phase,
    Role,
    Scalar,
    StageAction,
    TraceState,
    TrialState,
    UnitEvent,
    Untimed,
)


class Loading(NamedTuple):
    """Totals of a rank's DataLoaders so far, workers included."""

    t_ns: int
    batches: int
    fetch_ns: int
    transform_ns: int
    """The part of it in compositions of transforms that the agent knows."""
    collate_ns: int


class LoadingRead(NamedTuple):
    """Totals of what was read for some batches, about five per second of each worker."""

    t_ns: int
    read_bytes: int
    """By system calls, from wherever: page cache, disk, network, pipe."""
    disk_bytes: int
    major_faults: int
    nfs_bytes: int = 0
    """Bytes that the node read from NFS servers meanwhile, for any process."""


RECORD = struct.Struct("<QqQqqqqQ")
RECORD_SIZE = 64
assert RECORD.size == RECORD_SIZE

Raw = tuple[int, ...]
"""A record as unpacked by :data:`RECORD`: its eight words. The type leaves their number open, so that
compiled code passes the tuple on as it is."""


def pack_head(kind: int, op: int = 0, phase: int = 0, flags: int = 0) -> int:
    """Returns the four one-byte fields as one 32-bit word."""
    return kind | op << 8 | phase << 16 | flags << 24


def pack_place(group: int = 0, unit: int = 0) -> int:
    """Returns the two two-byte fields as one 32-bit word."""
    return group | unit << 16


_DOUBLE, _INTEGER = struct.Struct("<d"), struct.Struct("<q")


def float_bits(value: float) -> int:
    """Returns a float as the integer that a record's field holds."""
    return int(_INTEGER.unpack(_DOUBLE.pack(value))[0])


def from_bits(bits: int) -> float:
    """Returns the float that :func:`float_bits` encoded."""
    return float(_DOUBLE.unpack(_INTEGER.pack(bits))[0])


def activity_of(code: int) -> Activity:
    """Returns the activity with this number; NONE for one of another version."""
    return _ACTIVITIES.get(code, Activity.NONE)


_ACTIVITIES = {int(activity): activity for activity in Activity}


def pack_call_word(kind: int, op: int, phase: int, flags: int, group: int, unit: int) -> int:
    """Returns word 2: what all calls of one kind have in common."""
    return pack_head(kind, op, phase, flags) | pack_place(group, unit) << 32


def pack_dtype(dtype: int, engine: int) -> int:
    """Returns dtype and engine as the one field that a COUNTED record has for both."""
    return dtype | engine << 8


# ---- decoding -------------------------------------------------------------------------------------


class Event(Protocol):
    """A decoded record: an instance of one of the classes below."""

    @property
    def t_ns(self) -> int:
        """When it happened, or ended where it has a duration."""


_E = TypeVar("_E", bound=Event)

# An index is faster than a call of the enumeration, and also raises for an unknown number
OP, PHASE = tuple(Op), tuple(Phase)
_FIELD_READS = {
    "seq": "r[0]", "t": "r[1]", "op": "(r[2] >> 8 & 255)", "phase": "(r[2] >> 16 & 255)",
    "flags": "(r[2] >> 24 & 255)", "group": "(r[2] >> 32 & 65535)", "unit": "(r[2] >> 48)",
    "a": "r[3]", "b": "r[4]", "c": "r[5]", "d": "r[6]",
}  # fmt: skip
"""Name of a part of a record -> the expression that reads it from the :data:`Raw` record *r*."""
_LAYOUTS: dict[int, tuple[type, str]] = {}
_DECODERS: dict[int, Callable[[Raw], Event]] = {}
_TRAINING_EVENTS: set[type] = set()


def declare_record(kind: Kind, layout: str, *, by_training: bool) -> Callable[[type[_E]], type[_E]]:
    """Declares that a record of *kind* decodes to the class below.

    *layout* has one expression for each field of the class, in their order. An expression may name the
    parts of a record: ``t, op, phase, flags, group, unit, a, b, c, d``. *by_training*: only training
    itself causes the event, so it is progress. An event that another thread may write, such as the
    heartbeat's, goes on while training stands still.
    """

    def register_event(event: type[_E]) -> type[_E]:
        _LAYOUTS[int(kind)] = (event, layout)
        if by_training:
            _TRAINING_EVENTS.add(event)
        return event

    return register_event


def _compile_decoder(kind: int) -> Callable[[Raw], Event] | None:
    """Returns the decoder of *kind*, compiled from its layout; None for an unknown kind.

    Layouts are compiled when the first record of their kind is read: the agents never need them.
    """
    if kind not in _LAYOUTS:
        return None
    event, layout = _LAYOUTS[kind]
    fields = re.sub(rf"\b({'|'.join(_FIELD_READS)})\b", lambda m: _FIELD_READS[m[0]], layout)
    names = {**globals(), "event": event, "new": tuple.__new__}
    # a named tuple's own __new__ would be one more Python call a record
    decoder: Callable[[Raw], Event] = eval(f"lambda r: new(event, ({fields},))", names)
    _DECODERS[kind] = decoder
    return decoder


def kind_of_record(raw: Raw) -> int:
    """Returns the number of the kind of *raw*."""
    return raw[2] & 255


def decode_record(raw: Raw) -> Event | None:
    """Returns the event of *raw*; None for a kind or a value that this version does not know."""
    decoder = _DECODERS.get(raw[2] & 255) or _compile_decoder(raw[2] & 255)
    if decoder is None:
        return None
    try:
        return decoder(raw)
    except (IndexError, ValueError):
        return None


def is_training_progress(event: Event, background_unit: int = 0) -> bool:
    """Returns True if *event* shows that training advances.

    *background_unit*: the unit of collectives that other threads issue; 0 without any.
    """
    if type(event) not in _TRAINING_EVENTS:
        return False
    if isinstance(event, PhaseSpan):
        return not event.flags & Flag.ASYNC and event.phase is not Phase.GARBAGE_COLLECTION
    return not background_unit or getattr(event, "unit", 0) != background_unit


# ---- the records ----------------------------------------------------------------------------------


@declare_record(Kind.ISSUED, "t, OP[op], PHASE[phase], flags, group, unit, a, b, c, d", by_training=True)
class Issued(NamedTuple):
    """A collective was issued to the backend; it is in flight until its :class:`Done`."""

    t_ns: int
    op: Op
    phase: Phase
    flags: int
    group: int
    unit: int
    nbytes: int
    sequence: int
    dtype: int
    engine: int = 0
    """Number of the DeepSpeed engine that issued it; 0 for none."""


@declare_record(Kind.DONE, "t, OP[op], PHASE[phase], flags, group, unit, a, b, c, d", by_training=True)
class Done(NamedTuple):
    """A collective has ended. It blocked its caller, or the caller's stream, for ``blocked_ns``."""

    t_ns: int
    op: Op
    phase: Phase
    flags: int
    group: int
    unit: int
    nbytes: int
    issued_ns: int
    blocked_ns: int
    sequence: int


@declare_record(
    Kind.COUNTED, "t, OP[op], PHASE[phase], group, a, b, Untimed(c), d & 255, d >> 8", by_training=True
)
class Counted(NamedTuple):
    """Collectives that were counted but not timed. With ``op`` NONE the operation is unknown too."""

    t_ns: int
    op: Op
    phase: Phase
    group: int
    calls: int
    nbytes: int
    why: Untimed
    dtype: int = 0
    engine: int = 0


@declare_record(Kind.PHASE, "t, PHASE[phase], flags, a, activity_of(op), b, c, d", by_training=True)
class PhaseSpan(NamedTuple):
    """A rank spent ``[start_ns, t_ns]`` in one phase, without the phases that ended within it.

    ASYNC: another thread than that of training spent it, so it is part of no step.
    """

    t_ns: int
    phase: Phase
    flags: int
    start_ns: int
    activity: Activity = Activity.NONE
    nbytes: int = 0
    """Bytes that were saved or loaded, where the hook knows them."""
    file: int = 0
    """Which file was loaded whole into memory, the same number on all ranks of a host; 0: unknown."""
    lag_ns: int = 0
    """How much later than the host a device came to the end of the phase."""


@declare_record(Kind.STEP, "t, flags, a, b, c, Outcome(op), d", by_training=True)
class StepMark(NamedTuple):
    """An optimizer step has ended, with all its micro-steps."""

    t_ns: int
    flags: int
    step: int
    start_ns: int
    micro_steps: int
    outcome: Outcome = Outcome.APPLIED
    engine: int = 0


@declare_record(Kind.START, "t, a", by_training=True)
class Start(NamedTuple):
    """Until now the process set up: imports, process groups, model, first batch.

    The newest before the first step counts: the loop has begun with the batch or the forward that leads
    to the first backward.
    """

    t_ns: int
    process_start_ns: int


@declare_record(Kind.UNIT, "t, UnitEvent(op), PHASE[phase], flags, unit, a, b, c, d", by_training=True)
class UnitMark(NamedTuple):
    """An FSDP unit was unsharded, waited for or resharded."""

    t_ns: int
    event: UnitEvent
    phase: Phase
    flags: int
    unit: int
    blocked_ns: int
    allocated_bytes: int
    """Device bytes allocated at this moment on sampled steps, else -1."""
    nbytes: int = 0
    """Unsharded bytes of an UNSHARD, where the backend reports them, else 0."""
    gathered_bytes: int = 0
    """Bytes of all units that are unsharded now, where the backend reports them, else 0."""


@declare_record(Kind.MEMORY, "t, PHASE[phase], a, b, c, d", by_training=False)
class MemorySample(NamedTuple):
    """The counters of the caching allocator, bytes."""

    t_ns: int
    phase: Phase
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int


@declare_record(Kind.MEMORY_PEAK, "t, a, b, c, d", by_training=False)
class MemoryPeak(NamedTuple):
    """Counters of the allocator that only grow, and the memory of the device."""

    t_ns: int
    retries: int
    ooms: int
    free_bytes: int
    """Free on the device as the driver sees it (all processes), or -1."""
    capacity_bytes: int
    """Bytes that this process may use, or -1."""


@declare_record(Kind.ALLOCATED_PEAK, "t, PHASE[phase], a, b", by_training=False)
class AllocatedPeak(NamedTuple):
    """The allocator has handed out more than ever before."""

    t_ns: int
    phase: Phase
    """In which it did; OTHER: before the first forward."""
    nbytes: int
    step: int


@declare_record(Kind.HOST, "t, a, b, c", by_training=False)
class HostSample(NamedTuple):
    """Memory of the process on the host, bytes; -1 where unknown."""

    t_ns: int
    rss_bytes: int
    available_bytes: int
    pinned_bytes: int


@declare_record(Kind.GROUP_SEQUENCE, "t, group, a, b", by_training=False)
class GroupSequence(NamedTuple):
    """A process group's own count of collectives beside the number that the hooks counted."""

    t_ns: int
    group: int
    sequence: int
    seen: int


@declare_record(Kind.BEAT, "t, a, PHASE[phase], b, seq, c, d", by_training=False)
class Heartbeat(NamedTuple):
    """The agent is alive; ``errors`` counts its own exceptions. Counts are since it began."""

    t_ns: int
    errors: int
    phase: Phase
    step: int
    records: int = 0
    calls: int = 0
    """Calls of wrapped functions."""
    spent_ns: int = 0
    """Time of samples, and CPU time of the heartbeat's own thread."""


@declare_record(Kind.OOM, "t, a, b, c, d, PHASE[phase]", by_training=False)
class Oom(NamedTuple):
    """The device allocator could not serve a request."""

    t_ns: int
    requested_bytes: int
    total_bytes: int
    """Memory of the device."""
    free_bytes: int
    largest_block_bytes: int = -1
    """The largest free block in the allocator's cache, -1 where unknown."""
    phase: Phase = Phase.OTHER


@declare_record(Kind.EXIT, "t, ExitKind(op), a", by_training=False)
class Exit(NamedTuple):
    """The agent has ended. ``text`` is the id of a text in the name table, 0 for none."""

    t_ns: int
    how: ExitKind
    text: int


@declare_record(Kind.STALL, "t, OP[op], PHASE[phase], flags, unit, a, group, b, c, d", by_training=True)
class Stall(NamedTuple):
    """The compute stream stood still for collectives that it does not wait for by itself.

    Another stream waited for one, or DDP's reducer did, from C++.
    """

    t_ns: int
    op: Op
    phase: Phase
    flags: int
    unit: int
    blocked_ns: int
    group: int = 0
    """0 where unknown."""
    calls: int = 0
    """Collectives of which only this is known, and neither beginning nor end."""
    reached_ns: int = 0
    """When the stream began to wait; 0 where unknown."""
    sequence: int = 0
    """The group's number of the last of these *calls*, else that of the :class:`Done`; 0: unknown."""


@declare_record(Kind.BACKWARD_COMM, "t, group, a, b, c", by_training=True)
class BackwardComm(NamedTuple):
    """One backward's communication as DDP's reducer timed it: ``[start_ns, t_ns]``."""

    t_ns: int
    group: int
    start_ns: int
    compute_end_ns: int
    buckets: int


@declare_record(Kind.BUCKET, "t, group, unit, a, b, c", by_training=True)
class Bucket(NamedTuple):
    """A gradient bucket of DDP was complete; precedes the :class:`BackwardComm` of its backward."""

    t_ns: int
    group: int
    unit: int
    nbytes: int
    sequence: int
    """Equal on all ranks. Negative: the group's own sequence numbers do not count buckets."""
    number: int
    """Number of the bucket within its model."""


@declare_record(Kind.TRACE, "t, TraceState(op), a, b, c", by_training=False)
class TraceMark(NamedTuple):
    """A rank has advanced with a requested trace."""

    t_ns: int
    state: TraceState
    request: int
    step: int
    text: int
    """Id of a text with the reason, 0 for none."""


@declare_record(Kind.TRIAL, "t, TrialState(op), a, b, c, d", by_training=False)
class TrialMark(NamedTuple):
    """A rank has advanced with a change that is tried."""

    t_ns: int
    state: TrialState
    number: int
    step: int
    """The first step in this state."""
    text: int
    """Id of a text with the reason, 0 for none."""
    cost_ns: int
    """How long the change took to undo."""


@declare_record(
    Kind.PRECISION, "t, group, from_bits(a), b, from_bits(c) if d else None", by_training=True
)
class Precision(NamedTuple):
    """Mixed precision at the end of an optimizer step."""

    t_ns: int
    engine: int
    loss_scale: float
    """NaN without loss scaling."""
    hysteresis: int
    """Overflows until the scale is lowered; -1 where there is none."""
    grad_norm: float | None
    """Norm before clipping; infinite or NaN when the gradients were. None: unknown on this rank."""


@declare_record(Kind.ROLE, "t, Role(op), a, b, c, d", by_training=False)
class RoleBytes(NamedTuple):
    """Bytes of one role in this process, by location. Each storage is counted once."""

    t_ns: int
    role: Role
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    pinned_bytes: int
    """The page-locked part of ``host_bytes``."""


@declare_record(Kind.TRANSFER, "t, Path(op), a, b, c, d", by_training=True)
class Transfer(NamedTuple):
    """Offloaded state that moved in one step."""

    t_ns: int
    path: Path
    nbytes: int
    busy_ns: int
    """Time with a transfer under way; 0 where only the bytes are known."""
    blocked_ns: int
    """Time that the training thread was blocked by the transfers."""
    calls: int


@declare_record(Kind.STAGE, "t, StageAction(op), a, b, c", by_training=True)
class StageRun(NamedTuple):
    """A stage of a pipeline computed ``[start_ns, t_ns]`` for one micro-batch."""

    t_ns: int
    action: StageAction
    start_ns: int
    stage: int
    """The stage's number; for a CALL, the number of the schedule, a new one after each change."""
    micro_batch: int
    """The micro-batch's number; for a CALL, the count of its micro-batches."""


@declare_record(Kind.SCALAR, "t, Scalar(op), from_bits(a), b", by_training=False)
class ScalarValue(NamedTuple):
    """The loss, the norm of the gradients or the learning rate of a step, as the host knows it."""

    t_ns: int
    scalar: Scalar
    value: float
    """May be infinite or NaN."""
    step: int


@declare_record(Kind.BATCH, "t, a, b, c, d, Padding(op)", by_training=True)
class BatchMark(NamedTuple):
    """Sizes of the model's inputs in the step that ends, all micro-steps together."""

    t_ns: int
    samples: int
    tokens: int
    """Without padding where :attr:`padding` says so; -1 where batches hold no tokens."""
    positions: int
    """Tokens with padding."""
    pairs: int
    """The sum of positions times the length of their sequence, which attention computes."""
    padding: Padding


declare_record(Kind.LOADING, "t, a, b, c, d", by_training=False)(Loading)
declare_record(Kind.LOADING_READ, "t, a, b, c, d", by_training=False)(LoadingRead)
