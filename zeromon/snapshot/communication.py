"""Collectives, units, gathers, hangs, stragglers and links."""

from __future__ import annotations

from dataclasses import dataclass

from zeromon.ring.codes import TextEnum


class HangKind(TextEnum):
    """Why a collective does not end, as far as the progress of its members shows."""

    MISMATCHED_OPERATIONS = "mismatched operations"
    MISMATCHED_SIZES = "mismatched sizes"
    MISMATCHED_UNITS = "mismatched units"
    MISMATCHED_NUMBERS = "mismatched numbers of calls"
    DEAD_MEMBER = "a member is dead"
    LEFT_MEMBER = "a member has left"
    MISSING_MEMBER = "a member has not come"
    UNSEEN_MEMBERS = "members on other nodes are not seen"
    ALL_INSIDE = "all members are in it"
    NO_PEER = "its peer has not answered"
    DEADLOCK = "deadlock of groups"
    UNKNOWN = "for an unknown reason"
    """The text of another version."""

    @classmethod
    def _missing_(cls, _: object) -> HangKind:
        return cls.UNKNOWN

    @property
    def is_mismatch(self) -> bool:
        """True if the members called different things."""
        return self.name.startswith("MISMATCHED")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Totals of one operation in one group."""

    op: str
    group: str
    group_size: int
    count: int
    timed: int
    nbytes: int
    quantized_bytes: int
    """The part of it that was sent in 8 bits (ZeRO++)."""
    nodes: int
    """Over how many nodes the group spreads; 0 where the launcher does not say."""
    seconds: float
    exposed_seconds: float
    busbw_bytes_per_second: float | None
    """Over the last steps; includes the wait for a late rank. None for what has none (barrier)."""
    best_busbw_bytes_per_second: float
    dim: str = ""
    """The name of the group's dimension (``tp``); "" from Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveStatsRow:
    """One operation in one group, phase and unit (or bucket); means a timed step over the last ones."""

    op: str
    group: str
    group_size: int
    nodes: int
    """Over how many nodes the group spreads; 0 where the launcher does not say."""
    phase: str
    unit: str
    """An FSDP or ZeRO-3 unit, a gradient bucket; "" where the caller belongs to none."""
    count: int
    """Calls in all timed steps."""
    calls: float
    nbytes: float
    seconds: float
    """From the call to the end: transfer, wait for late ranks, and where the end is known late, more."""
    exposed_seconds: float
    exposed_total_seconds: float
    wait_seconds: float | None
    """For ranks of this node that came later; None while no collective is matched."""
    transfer_seconds: float | None
    """The shortest duration over ranks."""
    algbw_bytes_per_second: float | None
    busbw_bytes_per_second: float | None
    """Bus bandwidth of the transfer where it is known, else of the whole time."""
    best_busbw_bytes_per_second: float
    dim: str = ""
    """The name of the group's dimension (``tp``); "" from Prometheus."""


SIZE_BOUNDS = tuple(1 << bits for bits in range(10, 31, 2))
"""Upper bounds of the size histogram, bytes: 1 KiB, 4 KiB, ... 1 GiB; a last bucket has larger calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A dimension of the parallelism that a rank is a part of."""

    name: str
    size: int = 1
    """Ranks in the rank's own group."""
    nodes: int = 0
    """Over how many nodes that group spreads; 0 where the launcher does not say."""
    used: bool = False
    """A collective was issued on it, or parameters or pipeline stages are divided along it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """How large the collectives of one operation are."""

    op: str
    calls: tuple[int, ...]
    """By the bounds of :data:`SIZE_BOUNDS`; the last count is of larger calls."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Max bandwidth of the links of a rank, one direction, bytes/s; None where unknown."""

    device_bytes_per_second: float | None = None
    """Between the devices of a node: all NVLinks, else PCIe."""
    device_kind: str = ""
    network_bytes_per_second: float | None = None
    """All network adapters of the node together."""
    network_kind: str = ""
    host_bytes_per_second: float | None = None
    """Between the device and its host: PCIe."""
    host_kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """Totals of one FSDP unit."""

    fqn: str
    unshards: int
    exposed_seconds: float
    peak_allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRow:
    """ZeRO-3's gathers of parameters, by whether they were issued ahead of need; timed steps only."""

    outcome: str
    """``ahead`` (a prefetch) or ``late`` (asked for when it was needed)."""
    nbytes: int
    exposed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """How far a rank has come in a process group."""

    group_id: str
    """The group's id, equal on all its members."""
    label: str
    ranks: tuple[int, ...]
    sequence: int
    """The number of the last collective that was issued; -1 before the first."""
    op: str = "none"
    """The operation of that collective, ``none`` where it is unknown."""
    nbytes: int = 0
    unit: str = ""
    phase: str = ""
    dim: str = ""
    """The name of its dimension (``tp``)."""
    step_sequence: int = -1
    """The number when the last step ended; -1 where that step issued none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCall:
    """A collective that one rank called."""

    rank: int
    sequence: int
    """The group's number of the collective; -1 where it is unknown."""
    op: str = "none"
    nbytes: int = -1
    """-1 where it is unknown."""
    unit: str = ""
    phase: str = ""
    is_repeated: bool = False
    """True if the same phase had called the same operation of the same unit before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHistory:
    """The last collectives that a rank called from Python in one group, the oldest first."""

    rank: int
    calls: tuple[MemberCall, ...]
    in_cpp: int
    """Collectives of the group that C++ issued: with any, the numbers are not those of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A collective that does not end, or broke off; see :mod:`zeromon.diagnosis.hangs`."""

    kind: HangKind
    op: str
    group: str
    group_id: str
    sequence: int
    nbytes: int
    seconds: float
    """0 for one that broke off."""
    waiting: tuple[int, ...]
    """Ranks that are in it."""
    missing: tuple[int, ...] = ()
    """Members that live and have not called it."""
    dead: tuple[int, ...] = ()
    """Members that had ended before, also without an error."""
    elsewhere: tuple[int, ...] = ()
    """Members on other nodes."""
    calls: tuple[MemberCall, ...] = ()
    """The members' calls where they first differed; the call that each is in where they agree."""
    pause: str = ""
    """The expected pause of a missing rank, where that explains it: ``rank 0 compiles``; else ""."""
    dim: str = ""
    """The name of the group's dimension (``tp``); "" from Prometheus."""
    members: tuple[int, ...] = ()
    """The ranks of the group; empty where they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that others wait for; see :mod:`zeromon.diagnosis.stragglers`."""

    rank: int
    late_seconds: float
    """Behind the second to last, a step."""
    share: float
    """:attr:`late_seconds` as a share of a step."""
    since_step: int
    phases: tuple[str, ...]
    """Where it spends more time than the others, () where that is not to be seen."""
    longer_seconds: float
    """By how much, a step."""
    cause: str = ""
    """The cause on its host or device, in words; "" where nothing explains it."""
    node: str = ""
    """Where it is, when that is another node than this one."""
    whole_node: bool = False
    """All ranks of that node come after all others; *rank* is one of them."""

    @property
    def straggler_name(self) -> str:
        """``rank 3``, ``rank 3 on node b``, ``node b``."""
        if self.whole_node:
            return f"node {self.node}"
        return f"rank {self.rank} on node {self.node}" if self.node else f"rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A collective that was issued and has not ended."""

    op: str
    group: str
    sequence: int
    unit: str
    phase: str
    nbytes: int
    issued_ns: int
    group_id: str = ""


# ---- what NCCL itself says ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorRow:
    """One operation of a rank in one communicator: means of Inspector's last records."""

    communicator: str
    """NCCL's hash of it."""
    group_id: str
    """The process group that it belongs to; "" where none or several have these members."""
    group: str
    size: int
    place: int
    """The rank's number in the communicator."""
    op: str
    number: int
    """NCCL's number of the newest collective."""
    nbytes: int
    """Bytes of the newest."""
    records: int
    """How many the means are of. Inspector writes a sample, not every collective."""
    seconds: float
    busbw_bytes_per_second: float
    timing: str
    """``kernel_gpu``: by the clock of the device; ``kernel_cpu``, ``collective_cpu``: by the host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RasCount:
    """How often the ranks of a communicator have launched an operation."""

    op: str
    most: int
    behind: tuple[tuple[int, int], ...]
    """(place in the communicator, count) of those that have launched fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RasCommunicator:
    """A communicator that has launched collectives, or of which ranks do not answer."""

    communicator: str
    group_id: str
    """As in :class:`InspectorRow`."""
    size: int
    counts: tuple[RasCount, ...]
    unresponsive: tuple[int, ...]
    """Places of ranks that RAS cannot reach, of which *dead* are given up."""
    dead: tuple[int, ...]
    failed: tuple[int, ...]
    """Places of ranks in which NCCL has met an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ras:
    """NCCL's answer about the whole job, asked for while a collective hangs."""

    note: str
    """Why there is none; "" where there is one."""
    communicators: tuple[RasCommunicator, ...] = ()


# ---- A pipeline of stages as one of its ranks sees it -------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage of a rank; means of the last calls of the schedule."""

    stage: int
    seconds: dict[str, float]
    """Action (``forward``, ``backward``, ``backward_input``, ``backward_weight``) -> seconds of one."""
    micro_batch_waits: tuple[float, ...]
    """Micro-batch -> seconds a call in which its sends and receives blocked the rank."""

    @property
    def work_seconds(self) -> float:
        """Seconds that the stage computes for one micro-batch."""
        return sum(self.seconds.values())

    @property
    def wait_seconds(self) -> float:
        """Seconds a call in which the stage's sends and receives blocked the rank."""
        return sum(self.micro_batch_waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBubble:
    """The bubble of a rank, and what would shorten that of its pipeline; see diagnosis.pipelines."""

    measured_ratio: float
    ideal_ratio: float
    """The idle share by the order of the schedule and the measured times, if messages took no time."""
    span_seconds: float
    """Seconds of the rank that takes longest from its first action to its last."""
    ideal_seconds: float
    """:attr:`span_seconds` where messages take no time."""
    doubled_seconds: float
    """:attr:`ideal_seconds` with twice as many micro-batches of half the size."""
    balanced_seconds: float
    """:attr:`ideal_seconds` where all stages take equally long."""
    slowest_stage: int
    slowest_seconds: float
    """Seconds of one micro-batch on the slowest stage."""
    mean_seconds: float
    """Seconds of one micro-batch on a stage, mean of all stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """One rank of a pipeline; means of the last calls of the schedule, without the first step."""

    schedule: str
    """torch's name without ``Schedule``: ``GPipe``, ``1F1B``, ``Interleaved1F1B``, ..."""
    stages: int
    micro_batches: int
    stage_ranks: tuple[int, ...]
    """Stage -> global rank."""
    on_device: bool
    own: tuple[StageRow, ...]
    """The stages of this rank."""
    order: str
    """The actions of a call in torch's notation, such as ``0F0 0F1 0B0``."""
    busy_seconds: float | None
    span_seconds: float | None
    bubble: PipelineBubble | None = None
    unknown: str = ""
    """Why the bubble is not known; "" where it is."""
