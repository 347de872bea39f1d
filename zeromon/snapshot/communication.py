"""Collectives, units, hangs, stragglers and links; bandwidths; the schedule of a pipeline. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeromon.ring.codes import Op, StageAction, TextEnum

# ---- the schedule of a pipeline ------------------------------------------------------------------

# The bubble of a rank is the idle share of the pipeline's time, which is that of the rank with the
# longest time from its first action to its last (Qi et al. 2023, arXiv 2401.10241, section 5.2). For
# GPipe and 1F1B with p equal stages and m micro-batches it is (p - 1) / (m + p - 1) (Narayanan et al.
# 2021, arXiv 2104.04473, section 2.2, as a share of the whole instead of the ideal time).


LETTERS = {
    StageAction.FORWARD: "F",
    StageAction.BACKWARD: "B",
    StageAction.BACKWARD_INPUT: "I",
    StageAction.BACKWARD_WEIGHT: "W",
}
"""torch's own letters."""
_ACTIONS = {letter: action for action, letter in LETTERS.items()}
_FORM = re.compile(r"(\d+)([FBIW])(\d+)")

Seconds = Mapping[tuple[int, StageAction], float]
"""(stage, action) -> seconds of one micro-batch."""


class Act(NamedTuple):
    """One action of a schedule."""

    stage: int
    action: StageAction
    micro_batch: int


class Run(NamedTuple):
    """When a rank computes: its first start, its last end, and the time it computes between them."""

    start: float
    end: float
    busy: float

    @property
    def span(self) -> float:
        """From the first start to the last end."""
        return self.end - self.start


def schedule_notation(order: Iterable[Act]) -> str:
    """Returns *order* in torch's notation: ``0F0 0F1 0B0``."""
    return " ".join(f"{a.stage}{LETTERS[a.action]}{a.micro_batch}" for a in order)


def parse_schedule(notation: str) -> list[Act]:
    """Reads what :func:`schedule_notation` wrote."""
    matches = (_FORM.fullmatch(token) for token in notation.split())
    return [Act(int(m[1]), _ACTIONS[m[2]], int(m[3])) for m in matches if m]


def simulate_schedule(orders: Sequence[Sequence[Act]], seconds: Seconds) -> list[Run] | None:
    """Returns when each rank computes, if it follows its order and messages take no time.

    None where the orders wait for each other, or for an action that none has.
    """
    final = max((act.stage for order in orders for act in order), default=0)
    times: dict[tuple[int, bool, int], float] = {}
    """(stage, forward?, micro-batch) -> when its result can be sent on."""
    free, busy = [0.0] * len(orders), [0.0] * len(orders)
    starts: list[float | None] = [None] * len(orders)
    done = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                act = order[done[rank]]
                ready_at = _input_time(act, final, times)
                if ready_at is None:
                    break
                start, cost = (max(free[rank], ready_at), seconds.get((act.stage, act.action), 0.0))
                if starts[rank] is None:
                    starts[rank] = start
                free[rank] = start + cost
                busy[rank] += cost
                # The stage before waits for the gradients of inputs, and never for those of weights
                if act.action is not StageAction.BACKWARD_WEIGHT:
                    is_forward = act.action is StageAction.FORWARD
                    times[act.stage, is_forward, act.micro_batch] = free[rank]
                done[rank] += 1
                moved = True
    if any(count < len(order) for count, order in zip(done, orders, strict=True)):
        return None
    return [Run(s or 0.0, stop, b) for s, stop, b in zip(starts, free, busy, strict=True)]


def _input_time(act: Act, final: int, times: Mapping[tuple[int, bool, int], float]) -> float | None:
    """When the input of *act* is there; None while that is open."""
    if act.action is StageAction.FORWARD:
        return 0.0 if act.stage == 0 else times.get((act.stage - 1, True, act.micro_batch))
    if act.action is StageAction.BACKWARD_WEIGHT or act.stage == final:
        return 0.0  # its own earlier action, which its rank's order has before it
    return times.get((act.stage + 1, False, act.micro_batch))


def balanced_seconds(seconds: Seconds) -> dict[tuple[int, StageAction], float]:
    """*seconds* with all stages' work spread evenly, in each stage's shares of forward and backward."""
    work: dict[int, float] = {}
    for (stage, _), duration in seconds.items():
        work[stage] = work.get(stage, 0.0) + duration
    mean = sum(work.values()) / len(work) if work else 0.0
    return {key: s * mean / work[key[0]] if work[key[0]] else s for key, s in seconds.items()}


def with_more(span: float, most_busy: float, factor: float = 2.0) -> float:
    """Returns *span* with *factor* times as many micro-batches, each smaller by that factor.

    The rank that computes most does so for *most_busy* in any case. What it waits besides is the filling
    and draining of the pipeline, which takes a fixed number of micro-batches.
    """
    return most_busy + (span - most_busy) / factor


# ---- bandwidth and overlap -----------------------------------------------------------------------

BUS_FACTOR: dict[Op, Callable[[int], float]] = {
    Op.ALL_REDUCE: lambda n: 2 * (n - 1) / n,
    Op.ALL_GATHER: lambda n: (n - 1) / n,
    Op.REDUCE_SCATTER: lambda n: (n - 1) / n,
    Op.ALL_TO_ALL: lambda n: (n - 1) / n,
    Op.GATHER: lambda n: (n - 1) / n,
    Op.SCATTER: lambda n: (n - 1) / n,
    Op.BROADCAST: lambda n: 1.0,
    Op.REDUCE: lambda n: 1.0,
    Op.SEND: lambda n: 1.0,
    Op.RECV: lambda n: 1.0,
}
"""busbw / algbw for a group of n ranks (nccl-tests, doc/PERFORMANCE.md)."""


def algbw(total_bytes: float, seconds: float) -> float | None:
    """Returns the algorithm bandwidth in bytes/s; None when *seconds* is not positive.

    *total_bytes* is S of nccl-tests: for all-gather and reduce-scatter the full, unsharded size.
    """
    return total_bytes / seconds if seconds > 0 else None


def busbw(op: Op, total_bytes: float, seconds: float, group_size: int) -> float | None:
    """Returns the bus bandwidth in bytes/s; None for a barrier, no bytes, no time, or a group of one."""
    factor = bus_factor(op, group_size)
    bandwidth = algbw(total_bytes, seconds)
    return bandwidth * factor if factor and bandwidth else None


def bus_factor(op: Op, group_size: int) -> float | None:
    """Returns busbw / algbw; None for a barrier or a group of one rank."""
    factor = BUS_FACTOR.get(op)
    return None if factor is None or group_size < 2 else factor(group_size)


def overlap_ratio(communication_ns: int, exposed_ns: int) -> float | None:
    """Returns |C ∩ K| / |C| of communication C and compute K; None without communication."""
    # Unknown communication is -1: the ratio would read as a full overlap
    if communication_ns <= 0:
        return None
    return min(1.0, max(0.0, 1 - exposed_ns / communication_ns))


# ---- collectives, units, gathers, hangs, stragglers and links ------------------------------------


class HangKind(TextEnum):
    """Why a collective does not end, as far as the progress of its members shows."""

    MISMATCHED_OPERATIONS = "mismatched operations"
    MISMATCHED_SIZES = "mismatched sizes"
    MISMATCHED_UNITS = "mismatched units"
    MISMATCHED_NUMBERS = "mismatched numbers of calls"
    DEAD_MEMBER = "a member is dead"
    LEFT_MEMBER = "a member has left"
    MISSING_MEMBER = "a member has not come"
    HALTED_MEMBER = "a member in it does not run"
    UNSEEN_MEMBERS = "members on other nodes are not seen"
    ALL_INSIDE = "all members are in it"
    NO_PEER = "its peer has not answered"
    DEADLOCK = "deadlock of groups"
    UNKNOWN = "for an unknown reason"
    """The text of another version."""

    @classmethod
    def _missing_(cls, _: object) -> "HangKind":
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
    """Over the last steps; includes the wait for a late rank. None for what has none (barrier), and
    where begin or end of nearly all calls is only a bound."""
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
    """Bus bandwidth of transfers where ranks are matched, else of the whole time; of calls whose begin
    and end are known. None where these are nearly none."""
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
    """Members that live and have not called it, or are in it and do not run."""
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
