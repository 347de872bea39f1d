"""The records that travel from a training process to everybody else, and their 64-byte layout.

A record is written by a hook with one ``struct`` call and read by another process, so the
layout is fixed: little-endian, eight 64-bit words, a sequence number at both ends.

====  =====  ==============================================================
word  field  meaning
====  =====  ==============================================================
0     seq    sequence number, starts at 1; written first, checked last
1     t_ns   CLOCK_MONOTONIC of the event (its end, where it has a duration)
2     kind, op, phase, flags (1 byte each), group, unit (2 bytes each)
3-6   a-d    four signed integers whose meaning depends on *kind*
7     low 32 bits of seq, written last and checked first; CRC
====  =====  ==============================================================

``crc`` is used only where the header asks for it (see :mod:`zeromon.ring`). Bytes are bytes,
times are nanoseconds; CLOCK_MONOTONIC is one clock for all processes of a node.
Nothing here reads a clock or touches a file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import NamedTuple

RECORD = struct.Struct("<QqBBBBHHqqqqII")
RECORD_SIZE = 64
assert RECORD.size == RECORD_SIZE


def head(kind: int, op: int = 0, phase: int = 0, flags: int = 0) -> int:
    """The four one-byte fields as one 32-bit word."""
    return kind | op << 8 | phase << 16 | flags << 24


def place(group: int = 0, unit: int = 0) -> int:
    """The two two-byte fields as one 32-bit word."""
    return group | unit << 16


Raw = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int]
"""A record as unpacked by :data:`RECORD`."""


class Op(IntEnum):
    """A communication operation, under the name the field uses."""

    NONE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_REDUCE = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    SEND = 9
    RECV = 10
    BARRIER = 11

    @property
    def label(self) -> str:
        """The value of the ``op`` label: ``all_gather``, ``reduce_scatter``, ..."""
        return self.name.lower()


class Phase(IntEnum):
    """What a rank is doing within a step."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    DATA_WAIT = 4
    CPU_OPTIMIZER = 5
    """The optimizer of offloaded state, on the host; the rest of its step is OPTIMIZER."""

    @property
    def label(self) -> str:
        """The value of the ``phase`` label."""
        return self.name.lower()


class UnitEvent(IntEnum):
    """What happened to an FSDP unit."""

    UNSHARD = 1
    """The all-gather of the unit was asked for."""
    WAIT_UNSHARD = 2
    """The parameters were waited for; ``blocked_ns`` is how long."""
    RESHARD = 3
    """The unsharded parameters were freed."""


class Role(IntEnum):
    """What bytes are for, in the words of ``torch.distributed._tools`` and of ZeRO."""

    SHARDED_PARAM = 1
    UNSHARDED_PARAM = 2
    MASTER_PARAM = 3
    """The fp32 copy of low-precision parameters."""
    SHARDED_GRAD = 4
    UNSHARDED_GRAD = 5
    OPTIMIZER_STATE = 6
    BUFFER = 7
    ALL_GATHER = 8
    """Buffers that parameters are gathered into."""
    REDUCE_SCATTER = 9
    """Buckets that gradients are reduced from."""
    SECONDARY_PARAM = 10
    """ZeRO++ hpZ: the second shard, within a node."""
    SWAP_BUFFER = 11
    """Staging buffers of offloaded state."""

    @property
    def label(self) -> str:
        """The value of the ``role`` label."""
        return self.name.lower()


class Path(IntEnum):
    """A way that offloaded state takes."""

    DEVICE_TO_HOST = 1
    HOST_TO_DEVICE = 2
    DISK_READ = 3
    DISK_WRITE = 4

    @property
    def label(self) -> str:
        """The value of the ``path`` label."""
        return self.name.lower()


class Outcome(IntEnum):
    """What became of an optimizer step."""

    APPLIED = 0
    SKIPPED = 1
    """Gradients overflowed: the parameters are as before."""


class Pool(IntEnum):
    """A memory that can run out."""

    DEVICE = 1
    HOST = 2

    @property
    def label(self) -> str:
        """The value of the ``pool`` label."""
        return self.name.lower()


class ExitKind(IntEnum):
    """How a rank said goodbye; a rank that was killed says nothing."""

    CLEAN = 1
    EXCEPTION = 2
    DETACHED = 3


class TraceState(IntEnum):
    """How far a rank is with a trace that was asked for."""

    WAITING = 1
    RECORDING = 2
    SAVED = 3
    REFUSED = 4
    FAILED = 5

    @property
    def label(self) -> str:
        """In words."""
        return self.name.lower()


class Dtype(IntEnum):
    """The element type of a collective's payload, as a small number."""

    UNKNOWN = 0
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT64 = 4
    INT8 = 5
    UINT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    BOOL = 10
    FLOAT8_E4M3FN = 11
    FLOAT8_E5M2 = 12


class Flag(IntFlag):
    """Bits of the ``flags`` byte. Their meaning does not depend on the kind."""

    ASYNC = 1
    """Issued with ``async_op=True``."""
    END_KNOWN = 2
    """``t_ns`` is the completion itself, not only an upper bound."""
    FAILED = 4
    """The call raised."""
    IDLE = 8
    """The step ran with the timing hooks idle, to measure what they cost."""
    CONTINUED = 16
    """A further optimizer of the same step: extends the last step."""
    INFERRED = 32
    """A phase derived from its neighbours, not observed."""
    DEVICE = 64
    """Timed by device events."""
    AHEAD = 128
    """Issued before the unit was needed: a prefetch."""


class Kind(IntEnum):
    """What a record is about; selects the decoder."""

    ISSUED = 1
    DONE = 2
    COUNTED = 3
    PHASE = 4
    STEP = 5
    UNIT = 6
    MEMORY = 7
    MEMORY_PEAK = 8
    HOST = 9
    GROUP_SEQUENCE = 10
    BEAT = 11
    OOM = 12
    EXIT = 13
    STALL = 14
    BACKWARD_COMM = 15
    PRECISION = 16
    ROLE = 17
    TRANSFER = 18
    BUCKET = 19
    TRACE = 20


class Issued(NamedTuple):
    """A collective that was handed to the backend; in flight until its :class:`Done`."""

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
    """Number of the DeepSpeed engine that was running, 0 for none."""


class Done(NamedTuple):
    """A collective that has ended. ``blocked_ns``: how long the caller, or its stream, stood still."""

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


class Counted(NamedTuple):
    """Collectives that were counted and not timed. ``op`` NONE: not even the operation is known."""

    t_ns: int
    op: Op
    phase: Phase
    group: int
    calls: int
    nbytes: int
    observed: bool
    """True when a hook saw the calls (their timing was idle); False for those issued from C++."""
    dtype: int = 0
    engine: int = 0


class PhaseSpan(NamedTuple):
    """A stretch of a step spent in one phase: ``[start_ns, t_ns]``."""

    t_ns: int
    phase: Phase
    flags: int
    start_ns: int


class StepMark(NamedTuple):
    """The end of an optimizer step, all its micro-steps included."""

    t_ns: int
    flags: int
    step: int
    start_ns: int
    micro_steps: int
    outcome: Outcome = Outcome.APPLIED
    engine: int = 0


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
    """Unsharded bytes that an UNSHARD asked for, where the backend says so, else 0."""
    gathered_bytes: int = 0
    """All that is gathered now, where the backend says so, else 0."""


class MemorySample(NamedTuple):
    """The caching allocator's figures, bytes."""

    t_ns: int
    phase: Phase
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int


class MemoryPeak(NamedTuple):
    """Allocator counters that only grow, and what the device has."""

    t_ns: int
    retries: int
    ooms: int
    free_bytes: int
    """Free on the device as the driver sees it (all processes), or -1."""
    capacity_bytes: int
    """What this process may use, or -1."""


class HostSample(NamedTuple):
    """Memory of the process on the host, bytes; -1 where unknown."""

    t_ns: int
    rss_bytes: int
    available_bytes: int
    pinned_bytes: int


class GroupSequence(NamedTuple):
    """The group's own count of collectives against those that passed our hooks."""

    t_ns: int
    group: int
    sequence: int
    seen: int


class Beat(NamedTuple):
    """A sign of life, with the agent's own health."""

    t_ns: int
    errors: int
    phase: Phase
    step: int


class Oom(NamedTuple):
    """The device allocator could not serve a request."""

    t_ns: int
    requested_bytes: int
    total_bytes: int
    """Of the device."""
    free_bytes: int
    largest_block_bytes: int = -1
    """The largest free block in the allocator's cache, -1 where unknown."""


class Exit(NamedTuple):
    """The agent's goodbye. ``text`` is the id of a text in the name table, 0 for none."""

    t_ns: int
    how: ExitKind
    text: int


class Stall(NamedTuple):
    """The compute stream waited for communication at a unit's boundary (device timing)."""

    t_ns: int
    op: Op
    phase: Phase
    flags: int
    unit: int
    blocked_ns: int


class BackwardComm(NamedTuple):
    """One backward's communication as DDP's reducer timed it: ``[start_ns, t_ns]``."""

    t_ns: int
    group: int
    start_ns: int
    compute_end_ns: int
    buckets: int


class Bucket(NamedTuple):
    """A gradient bucket of DDP was complete at *t_ns*; comes before the BACKWARD_COMM of its backward."""

    t_ns: int
    group: int
    unit: int
    nbytes: int
    sequence: int
    """The same on all ranks; negative, for the group's own numbers do not count these."""
    number: int
    """Of the bucket within its model."""


class TraceMark(NamedTuple):
    """A rank has come further with a trace that was asked for."""

    t_ns: int
    state: TraceState
    request: int
    step: int
    text: int
    """Id of a text that says why, 0 for none."""


class Precision(NamedTuple):
    """Mixed precision at the end of an optimizer step."""

    t_ns: int
    engine: int
    loss_scale: float
    """NaN without loss scaling."""
    hysteresis: int
    """Overflows until the scale is lowered; -1 where there is none."""
    grad_norm: float | None
    """Before clipping; infinite or NaN when the gradients were. None: not known here."""


class RoleBytes(NamedTuple):
    """Bytes of one role in this process, by where they are; each storage counted once."""

    t_ns: int
    role: Role
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    pinned_bytes: int
    """The part of the host's that is page-locked."""


class Transfer(NamedTuple):
    """Offloaded bytes that were moved in one step."""

    t_ns: int
    path: Path
    nbytes: int
    busy_ns: int
    """How long transfers were under way; 0 where only the bytes are known."""
    blocked_ns: int
    """How long the training thread stood still for them."""
    calls: int


Event = (
    Issued
    | Done
    | Counted
    | PhaseSpan
    | StepMark
    | UnitMark
    | MemorySample
    | MemoryPeak
    | HostSample
    | GroupSequence
    | Beat
    | Oom
    | Exit
    | Stall
    | BackwardComm
    | Bucket
    | TraceMark
    | Precision
    | RoleBytes
    | Transfer
)

_OPS = tuple(Op)
_PHASES = tuple(Phase)
_DOUBLE, _INTEGER = struct.Struct("<d"), struct.Struct("<q")


def float_bits(value: float) -> int:
    """A float as the integer that a record's field holds."""
    return int(_INTEGER.unpack(_DOUBLE.pack(value))[0])


def from_bits(bits: int) -> float:
    """The float that :func:`float_bits` stored."""
    return float(_DOUBLE.unpack(_INTEGER.pack(bits))[0])


def typed(dtype: int, engine: int) -> int:
    """Dtype and engine in the one field that a COUNTED record has for both."""
    return dtype | engine << 8


# fmt: off
_DECODERS: dict[int, Callable[[Raw], Event]] = {
    Kind.ISSUED: lambda r: Issued(r[1], _OPS[r[3]], _PHASES[r[4]], r[5], r[6], r[7], r[8], r[9], r[10], r[11]),
    Kind.DONE: lambda r: Done(r[1], _OPS[r[3]], _PHASES[r[4]], r[5], r[6], r[7], r[8], r[9], r[10], r[11]),
    Kind.COUNTED: lambda r: Counted(r[1], _OPS[r[3]], _PHASES[r[4]], r[6], r[8], r[9], bool(r[10]), r[11] & 255, r[11] >> 8),
    Kind.PHASE: lambda r: PhaseSpan(r[1], _PHASES[r[4]], r[5], r[8]),
    Kind.STEP: lambda r: StepMark(r[1], r[5], r[8], r[9], r[10], Outcome(r[3]), r[11]),
    Kind.UNIT: lambda r: UnitMark(r[1], UnitEvent(r[3]), _PHASES[r[4]], r[5], r[7], r[8], r[9], r[10], r[11]),
    Kind.MEMORY: lambda r: MemorySample(r[1], _PHASES[r[4]], r[8], r[9], r[10], r[11]),
    Kind.MEMORY_PEAK: lambda r: MemoryPeak(r[1], r[8], r[9], r[10], r[11]),
    Kind.HOST: lambda r: HostSample(r[1], r[8], r[9], r[10]),
    Kind.GROUP_SEQUENCE: lambda r: GroupSequence(r[1], r[6], r[8], r[9]),
    Kind.BEAT: lambda r: Beat(r[1], r[8], _PHASES[r[4]], r[9]),
    Kind.OOM: lambda r: Oom(r[1], r[8], r[9], r[10], r[11]),
    Kind.EXIT: lambda r: Exit(r[1], ExitKind(r[3]), r[8]),
    Kind.STALL: lambda r: Stall(r[1], _OPS[r[3]], _PHASES[r[4]], r[5], r[7], r[8]),
    Kind.BACKWARD_COMM: lambda r: BackwardComm(r[1], r[6], r[8], r[9], r[10]),
    Kind.BUCKET: lambda r: Bucket(r[1], r[6], r[7], r[8], r[9], r[10]),
    Kind.TRACE: lambda r: TraceMark(r[1], TraceState(r[3]), r[8], r[9], r[10]),
    Kind.PRECISION: lambda r: Precision(r[1], r[6], from_bits(r[8]), r[9], from_bits(r[10]) if r[11] else None),
    Kind.ROLE: lambda r: RoleBytes(r[1], Role(r[3]), r[8], r[9], r[10], r[11]),
    Kind.TRANSFER: lambda r: Transfer(r[1], Path(r[3]), r[8], r[9], r[10], r[11]),
}
# fmt: on


def decode(raw: Raw) -> Event | None:
    """The event that *raw* holds, or None for a kind or a value that this version does not know."""
    decoder = _DECODERS.get(raw[2])
    if decoder is None:
        return None
    try:
        return decoder(raw)
    except (IndexError, ValueError):
        return None
