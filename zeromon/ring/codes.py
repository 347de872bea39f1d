"""The numbers in records: operations, phases, roles and flags. They never change their meaning.

Rings and stores of earlier versions hold these numbers: add new ones, never reuse old ones.
"""

from enum import Enum, IntEnum, IntFlag
from functools import lru_cache


class TextEnum(str, Enum):
    """A string enumeration; ``str()`` and f-strings give the text (Python 3.11 has it as StrEnum)."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)


class _Labelled(IntEnum):
    """A number whose name is also the value of a metric label."""

    def __init__(self, _: int) -> None:
        self.label = self._name_.lower()
        """The value of the metric label."""


class Op(_Labelled):
    """A communication operation, by its usual name."""

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


class Phase(_Labelled):
    """A phase of a step, by what a rank is doing in it."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    DATA_WAIT = 4
    CPU_OPTIMIZER = 5
    """The optimizer of offloaded state, on the host; the rest of its step is OPTIMIZER."""
    EVALUATION = 6
    """With the batches and forwards within it."""
    CHECKPOINT = 7
    """The training thread saves or loads one; what it does in the background is no phase."""
    GARBAGE_COLLECTION = 8
    COMPILE = 9
    """torch.compile, and the capture of CUDA graphs."""
    GENERATION = 10
    """Text from a model: the rollout of an RL loop, with the forwards within it."""


ENQUEUED = (Phase.FORWARD, Phase.BACKWARD)
"""The phases in which a host enqueues kernels without waiting for the device. In an optimizer it waits,
where gradients are clipped or an overflow is looked for."""


class Activity(IntEnum):
    """The kind of work in a phase, where it may do several kinds."""

    NONE = 0
    SAVE = 1
    LOAD = 2
    FIRST_COMPILE = 3
    RECOMPILE = 4
    GRAPH_CAPTURE = 5
    WRAP = 6
    """A constructor of DDP, FSDP or DeepSpeed, before the training loop."""
    COLLECT_YOUNGEST = 10
    """Python's garbage collection of generation 0; the next two are those of generations 1 and 2."""
    COLLECT_MIDDLE = 11
    COLLECT_ALL = 12


class SetUp(TextEnum):
    """A part of the time before the training loop."""

    LAUNCH = "launch"
    """From the start of the process to the import of torch."""
    IMPORTS = "imports"
    """The import of torch, and the script's imports from there to the process groups."""
    PROCESS_GROUPS = "process groups"
    """The call of ``init_process_group``."""
    AGENT = "zeromon"
    """The start of zeromon's agent."""
    WRAP = "model wrapping"
    """The constructors of DDP, FSDP's units and DeepSpeed's engines."""
    SCRIPT = "script"
    """The rest: what the script itself does, such as building the model."""


class Scalar(_Labelled):
    """A number of the training itself, as a logger or the optimizer gives it."""

    LOSS = 1
    GRAD_NORM = 2
    """Before clipping, of all parameters."""
    LEARNING_RATE = 3
    """The learning rate of the optimizer's first parameter group."""


class Padding(IntEnum):
    """How the token count of a batch treats its padding."""

    NO_MASK = 0
    """The model got no attention mask: every position counts."""
    LEFT_OUT = 1
    INCLUDED = 2
    """The attention mask is on a device, where reading it would wait."""


class UnitEvent(IntEnum):
    """An event of an FSDP unit."""

    UNSHARD = 1
    """The all-gather of the unit was issued."""
    WAIT_UNSHARD = 2
    """The compute stream waited for the parameters, ``blocked_ns`` long."""
    RESHARD = 3
    """The unsharded parameters were freed."""


class Role(_Labelled):
    """A use of memory, in the terms of ``torch.distributed._tools`` and of ZeRO."""

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


class Path(_Labelled):
    """A direction in which offloaded state moves."""

    DEVICE_TO_HOST = 1
    HOST_TO_DEVICE = 2
    DISK_READ = 3
    DISK_WRITE = 4


class Outcome(IntEnum):
    """The outcome of an optimizer step."""

    APPLIED = 0
    SKIPPED = 1
    """Gradients overflowed, so the parameters did not change."""


class ExitKind(IntEnum):
    """How the agent of a rank ended; the agent of a killed rank sends no record."""

    CLEAN = 1
    EXCEPTION = 2
    DETACHED = 3


class StageAction(_Labelled):
    """A computation of a pipeline stage for one micro-batch, in the terms of torch's schedules."""

    CALL = 0
    """No computation: one call of the schedule, with all its micro-batches, has ended."""
    FORWARD = 1
    BACKWARD = 2
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4


class TraceState(_Labelled):
    """How far a rank is with a requested trace."""

    WAITING = 1
    RECORDING = 2
    SAVED = 3
    REFUSED = 4
    FAILED = 5


class TrialState(_Labelled):
    """How far a rank is with a change that is tried."""

    READY = 1
    OFF = 2
    ON = 3
    DONE = 4
    """All blocks are over, and the change is undone."""
    WITHDRAWN = 5
    """Undone before the last block."""
    REFUSED = 6
    """The rank never changed anything."""


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


class Untimed(IntEnum):
    """Why collectives were counted and not timed."""

    IN_CPP = 0
    """C++ issued them: replayed graphs, generated code, what a wrapper's constructor sends."""
    CONTROL_STEP = 1
    """The hooks were idle, to measure their overhead."""
    REDUCER = 2
    """DDP's reducer issued them, which times a backward as a whole."""


class Flag(IntFlag):
    """Bits of the ``flags`` byte; each means the same in every kind of record."""

    ASYNC = 1
    """Issued with ``async_op=True``, or between two ranks, which may be waited for later, too."""
    SPAN_KNOWN = 2
    """Begin and end of a collective are known: neither is only a bound."""
    FAILED = 4
    """The call raised."""
    IDLE = 8
    """A control step: the timing hooks were idle, to measure their overhead."""
    CONTINUED = 16
    """Extends the record before: another optimizer of the step, another backward of the micro-step."""
    INFERRED = 32
    """Derived from neighbouring records, not observed."""
    DEVICE = 64
    """Timed by device events."""
    AHEAD = 128
    """A prefetch: issued before the unit was needed."""


class Kind(IntEnum):
    """The type of a record; see the class of :mod:`zeromon.ring.events` with this kind."""

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
    START = 21
    STAGE = 22
    SCALAR = 23
    BATCH = 24
    TRIAL = 25
    LOADING = 26
    LOADING_READ = 27
    ALLOCATED_PEAK = 28


ITEM_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1,
    "Byte": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "ComplexFloat": 8,
}  # fmt: skip
"""Element type -> its size, bytes."""

# a name comes before the names that it contains
_OP_FRAGMENTS = (
    ("reduce_scatter", Op.REDUCE_SCATTER), ("reducescatter", Op.REDUCE_SCATTER),
    ("all_gather", Op.ALL_GATHER), ("allgather", Op.ALL_GATHER), ("all_reduce", Op.ALL_REDUCE),
    ("allreduce", Op.ALL_REDUCE), ("all_to_all", Op.ALL_TO_ALL), ("alltoall", Op.ALL_TO_ALL),
    ("broadcast", Op.BROADCAST), ("cross_device_reduce", Op.ALL_REDUCE),
    # NCCL's kernel of send, recv, all-to-all, gather and scatter
    ("sendrecv", Op.NONE),
    ("gather", Op.GATHER), ("scatter", Op.SCATTER), ("barrier", Op.BARRIER), ("reduce", Op.REDUCE),
    ("send", Op.SEND), ("recv", Op.RECV),
)  # fmt: skip


@lru_cache(maxsize=4096)
def operation_by_name(name: str) -> Op:
    """Returns the operation of a kernel or collective by its name; NONE for an unknown name."""
    lowered = name.lower()
    return next((op for fragment, op in _OP_FRAGMENTS if fragment in lowered), Op.NONE)
