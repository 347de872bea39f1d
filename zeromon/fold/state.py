"""The state of one rank between events: running totals, windows, and :class:`RankState`.

Times are nanoseconds of CLOCK_MONOTONIC, sizes bytes, ratios 0..1.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeVar

from zeromon.fold.collective_stats import CollectiveStats, Key, OpTotals
from zeromon.fold.saved_totals import EngineTotals, PathTotals
from zeromon.ring import codes, events, strategy
from zeromon.snapshot import StepSummary
from zeromon.snapshot.communication import Act, Dimension
from zeromon.snapshot.intervals import common_set, set_length, union_set
from zeromon.snapshot.ledger import Cause
from zeromon.snapshot.levels import UNTIMED
from zeromon.snapshot.rank import VIRTUAL
from zeromon.snapshot.step import RECENT_STEPS

_ON_DEVICE: Final = events.pack_head(0, flags=codes.Flag.DEVICE)
_END: Final = _ON_DEVICE | events.pack_head(0, flags=codes.Flag.SPAN_KNOWN)


def zeros_by_phase() -> list[int]:
    """Returns a zero for each phase."""
    return [0] * len(codes.Phase)


class EndedPhase(NamedTuple):
    """A phase that has ended, and its time without the phases within it."""

    start_ns: int
    end_ns: int
    phase: codes.Phase
    own_ns: int


class Window:
    """Sums since the step began."""

    __slots__ = (
        "allocated", "began_before", "blocked", "collectives", "ended", "late_ns", "launch_ns",
        "micro_steps", "nbytes", "offload_ns", "phase_exposed_ns", "phase_ns", "reserved", "rss",
        "samples", "scalars", "silent_ns", "spans", "stall_ns", "starved_ns", "timed", "tokens",
        "waited_only",
    )  # fmt: skip

    def __init__(self) -> None:
        self.spans: list[EndedPhase] = []
        """The outermost phases so far, in order."""
        self.ended: list[events.Raw] = []
        """The records of the collectives that have ended; of DDP, one that says what its reducer did."""
        self.blocked: list[events.Raw] = []
        """Those of them for which a caller was blocked."""
        self.phase_ns = zeros_by_phase()
        self.phase_exposed_ns = zeros_by_phase()
        self.collectives = self.timed = self.nbytes = 0
        self.waited_only = 0
        """Those of :attr:`timed` of which only the time that was waited for them is known."""
        self.stall_ns = self.offload_ns = self.late_ns = self.micro_steps = self.silent_ns = 0
        self.starved_ns = 0
        """In forwards and backwards that a device ended right behind the host."""
        self.launch_ns: list[int] = []
        """How long the host took for each phase, on a device."""
        self.allocated = self.reserved = self.rss = -1
        self.scalars: dict[str, float | None] = {}
        """Label of a scalar -> its value in the step; None where it is not finite."""
        self.samples = self.tokens = -1
        self.began_before = False
        """True if a wait began before its own collective; else :attr:`blocked` is communication."""

    def follow(self, first_part: "Window") -> None:
        """Adds the communication of *first_part*, the part of the same step before this one."""
        # In front: behind, the ends are out of order, and _covered_ns() sorts at each call
        self.ended[:0], self.blocked[:0] = first_part.ended, first_part.blocked
        self.collectives += first_part.collectives
        self.timed += first_part.timed
        self.waited_only += first_part.waited_only
        self.stall_ns += first_part.stall_ns
        self.began_before |= first_part.began_before
        for phase, exposed in enumerate(first_part.phase_exposed_ns):
            self.phase_exposed_ns[phase] += exposed

    def communicated_ns(self) -> tuple[int, int]:
        """Returns how long communication was under way, and how long of that a caller was blocked.

        The first is -1 where it is not known: when many collectives of a device began or ended. On a CPU
        it is an upper bound where a collective had ended before anything waited for it.
        """
        # What such a wait covers before its collective was issued is no communication
        if self.began_before:
            waits = union_set((record[1] - record[5], record[1]) for record in self.blocked)
            exposed = set_length(common_set(waits, union_set((r[4], r[1]) for r in self.ended)))
        else:
            exposed = _covered_ns(self.blocked, of_waits=True)
        under_way = _covered_ns(self.ended, of_waits=False)
        known = [record for record in self.ended if record[2] & _END != _ON_DEVICE]
        is_known = under_way - _covered_ns(known, of_waits=False) <= UNTIMED * under_way
        return under_way if is_known and not self.waited_only else -1, exposed + self.stall_ns


def _covered_ns(records: list[events.Raw], *, of_waits: bool) -> int:
    """The length of the union of what *records* of collectives last, or of their callers' waits."""
    ordered, until_ns = records, -(1 << 63)
    for record in records:
        if record[1] < until_ns:  # seldom: they are written as they end
            ordered = sorted(records, key=itemgetter(1))
            break
        until_ns = record[1]
    total, begin_ns = 0, ordered[-1][1] if ordered else 0
    # Backwards, because ends ascend: forwards, the union needs a sort by start
    for record in reversed(ordered):
        end_ns = record[1]
        start = end_ns - record[5] if of_waits else record[4]
        if end_ns < begin_ns:
            begin_ns = end_ns
        if start < begin_ns:
            total += begin_ns - start
            begin_ns = start
    return total


_CALLS = 10


@dataclass(slots=True)
class PipelineCall:
    """One call of a schedule: all micro-batches of a batch."""

    order: list[Act] = field(default_factory=list)
    spent_ns: dict[tuple[int, codes.StageAction], list[int]] = field(default_factory=dict)
    """(stage, action) -> how often, nanoseconds."""
    waited_ns: dict[tuple[int, int], int] = field(default_factory=dict)
    """(stage, micro-batch) -> nanoseconds blocked in sends and receives before an action of it."""
    first_ns: int = 0
    last_ns: int = 0
    busy_ns: int = 0

    @property
    def span_ns(self) -> int:
        """From the start of the first action to the end of the last."""
        return self.last_ns - self.first_ns


@dataclass(slots=True)
class PipelineCalls:
    """The last calls of a rank, and the one under way."""

    last: deque[PipelineCall] = field(default_factory=lambda: deque(maxlen=_CALLS))
    now: PipelineCall = field(default_factory=PipelineCall)
    schedule: int = 0
    """Number of the schedule of *last*."""
    waited_ns: int = 0
    """Blocked in sends and receives since the last action."""


STEP_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.65, 0.8, 1.0, 1.25, 1.6, 2.0,
    2.5, 3.2, 4.0, 5.0, 6.5, 8.0, 10.0, 12.5, 16.0, 20.0, 25.0, 30.0, 35.0, 45.0, 60.0, 90.0, 120.0,
    300.0,
)  # fmt: skip
"""Upper bounds of the step-time histogram, seconds. From 0.2 to 35 s each is at most 30 % above the one
before: so far a quantile may be off."""

MAX_IN_FLIGHT: Final = 4096
"""In one group."""
MAX_ARRIVALS: Final = 8192
LAST_WINDOWS: Final = 4
"""Optimizers that take turns have a model each, and DDP's times come with its next forward."""
_MAX_ID_CHARS = 200
_PAIRS = 128
_BEATS = 61
"""Heartbeats, one a second: the accounted overhead covers the last minute."""


# The numbers, not the record that has them: compiled, they lie side by side
@dataclass(slots=True, eq=False)
class Arrival:
    """A collective that ended at a rank; the collector matches it with those of the other ranks."""

    group: int
    sequence: int
    issued_ns: int
    ended_ns: int
    nbytes: int
    blocked_ns: int
    """For how long the rank was blocked."""
    waits_from_ns: int
    """When the rank began to wait, at the earliest when it arrived: before, it computed."""
    step: int
    timed_step: int
    """The count of timed steps, the steps of a row."""
    row: CollectiveStats
    on_device: bool = False
    is_wait: bool = False
    """True where a stream's wait for it is known, and neither its beginning nor its bytes."""
    span_known: bool = True
    """True where it is not only a bound."""
    on_host: bool = True
    """True where no device runs it: then its begin is known."""


KEPT_CALLS: Final = 256
"""Last collectives that are kept in each group, to find the first that ranks called differently."""
_NONE_ISSUED: Final[events.Raw] = (0, 0, 0, 0, -1, 0, 0, 0)


@dataclass(slots=True)
class GroupCalls:
    """How far a rank has come in one group, by the group's sequence numbers."""

    recent: deque[events.Raw] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))
    """The records of the last collectives that Python issued, without sends and receives."""
    ended: int = 0
    """The sequence number of the last collective that ended."""
    in_flight: dict[int, events.Raw] = field(default_factory=dict)
    """Sequence number -> the record with which a collective was issued that has not ended."""
    background: dict[int, events.Raw] = field(default_factory=dict)
    """As :attr:`in_flight`, of other threads than that of training."""
    inferred: dict[int, events.Raw] = field(default_factory=dict)
    """As :attr:`in_flight`, from torch's Flight Recorder; 0: the newest call of a control step."""
    failed: events.Raw = _NONE_ISSUED
    """The record with which the last collective that raised was issued."""
    before_cpp: int = -1
    """Number of the newest call of Python when C++ was last seen to issue a collective."""
    reduced: events.Counted | None = None
    """The collectives that DDP's reducer issued last."""
    step_from: int = -1
    """The group's own number when the step before the last one ended."""
    step_until: int = -1
    """The group's own number when the last step ended."""

    @property
    def last(self) -> events.Raw:
        """The record of the last collective that Python issued; its number is -1 before the first."""
        return self.recent[-1] if self.recent else _NONE_ISSUED


NO_CALLS = GroupCalls()


@dataclass(slots=True)
class Call:
    """The attributes that collectives of one kind, operation, phase, group, unit and flags share.

    Nine of ten records are of collectives, and few differ in these: each is looked up by one word.
    """

    is_issue: bool
    """It was issued; else it has ended."""
    counts: bool
    """Neither inferred, which is counted elsewhere, nor failed."""
    op: codes.Op
    phase: codes.Phase
    group: int
    unit: int
    is_ahead: bool
    on_device: bool
    span_known: bool
    of_group: GroupCalls
    row: CollectiveStats


class Spent(NamedTuple):
    """Totals of an agent's work since it began, at a heartbeat."""

    t_ns: int
    step: int
    records: int
    calls: int
    spent_ns: int


@dataclass(slots=True)
class UnitTotals:
    """Running totals of one FSDP unit."""

    unshards: int = 0
    exposed_ns: int = 0
    peak_allocated_bytes: int = -1


@dataclass(slots=True)
class ActivityTotals:
    """Running totals of what a phase did, on the training thread or in the background."""

    count: int = 0
    ns: int = 0
    longest_ns: int = 0
    nbytes: int = 0
    last_end_ns: int = 0
    file: int = 0
    """The largest file that was loaded whole."""
    file_bytes: int = 0


@dataclass(slots=True)
class BatchTotals:
    """Totals of a rank's model inputs; see :class:`zeromon.ring.events.BatchMark`."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    positions: int = 0
    pairs: int = 0
    padding: int = 0


@dataclass(slots=True)
class ScalarTotals:
    """The newest value of a loss, gradient norm or learning rate, and those that were not finite."""

    value: float = 0.0
    step: int = 0
    nonfinite: int = 0
    """Steps."""
    first_nonfinite_step: int = 0
    last_nonfinite_step: int = 0


@dataclass(slots=True)
class LedgerSums:
    """Nanoseconds of all steps, by phase; see :mod:`zeromon.fold.ledger`."""

    spent_ns: list[int] = field(default_factory=zeros_by_phase)
    exposed_ns: list[int] = field(default_factory=zeros_by_phase)
    """The exposed part of it; of a step that was not timed, by the share of those before it."""
    timed_ns: list[int] = field(default_factory=zeros_by_phase)
    """The part in steps whose communication was timed."""
    timed_exposed_ns: list[int] = field(default_factory=zeros_by_phase)
    offload_ns: int = 0
    stall_ns: int = 0
    """Nanoseconds of stalls that are over."""
    hang_ns: dict[str, int] = field(default_factory=dict)
    """Rank that was waited for, "" where it is not known -> the same of hangs."""
    silent_set_up_ns: int = 0
    """The part of both before the first step."""
    since_save_ns: int = 0
    """Nanoseconds of the steps that ended since the last checkpoint was saved."""
    unsaved_steps: int = 0
    """Their number."""
    checkpoints: int = 0
    """Saves on the training thread; those without a step between them are one."""


@dataclass(slots=True)
class Silence:
    """A time without progress that the collector has judged to be a stall or part of a hang."""

    cause: Cause
    of: str
    """The rank that is waited for, "" where it is not known."""
    since_ns: int
    counted_ns: int = 0
    """Up to when it is counted already: no total may decrease."""


_PEAKS = 64


@dataclass(slots=True)
class RankState:
    """The state of one rank. :func:`~zeromon.fold.fold.fold_event` and the rank's follower change it."""

    rank: int = 0
    pid: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    units: dict[int, str] = field(default_factory=dict)
    unit_bytes: dict[int, int] = field(default_factory=dict)
    """Unit -> bytes of its parameters while they are gathered."""
    texts: dict[int, str] = field(default_factory=dict)

    step: int = 0
    steps: int = 0
    step_end_ns: int = 0
    startup_ns: int = -1
    """From the start of the process to the training loop; -1 while unknown."""
    phase: codes.Phase = codes.Phase.OTHER
    unit: int = 0
    first_event_ns: int = 0
    last_event_ns: int = 0
    progress_ns: int = 0
    """Time of the newest event that training itself has caused."""
    silence: Silence | None = None
    """The stall or hang that lasts."""

    history: deque[StepSummary] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    step_bucket_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    step_ns: int = 0
    phase_ns: list[int] = field(default_factory=zeros_by_phase)
    ops: defaultdict[tuple[codes.Op, int], OpTotals] = field(
        default_factory=lambda: defaultdict(OpTotals)
    )
    untimed: dict[int, int] = field(default_factory=dict)
    unattributed: dict[int, int] = field(default_factory=dict)
    in_cpp: int = 0
    sequences: dict[int, tuple[int, int]] = field(default_factory=dict)
    unit_totals: defaultdict[int, UnitTotals] = field(default_factory=lambda: defaultdict(UnitTotals))
    group_calls: defaultdict[int, GroupCalls] = field(default_factory=lambda: defaultdict(GroupCalls))
    calls: dict[int, Call] = field(default_factory=dict)
    """Word 2 of a record of a collective -> what such records have in common."""
    background_unit: int = 0
    """The id of :data:`~zeromon.ring.model_metadata.BACKGROUND`; 0 until a collective has it."""
    arrivals: list[Arrival] = field(default_factory=list)
    """Those that have ended since the collector last took them, the newest :data:`MAX_ARRIVALS`."""
    step_arrivals: list[Arrival] = field(default_factory=list)
    """Those of a device's step that goes on: its stream may wait for them later in the step."""
    traffic: dict[Key, CollectiveStats] = field(default_factory=dict)
    sizes: dict[codes.Op, list[int]] = field(default_factory=dict)
    """Operation -> calls by size, then bytes, of the calls that were counted but not timed."""
    buckets: list[events.Bucket] = field(default_factory=list)
    """DDP's buckets of a backward pass that has not ended."""
    unit_groups: dict[tuple[codes.Op, int], int] = field(default_factory=dict)
    """(operation, unit) -> the group in which the unit communicates."""
    timed_steps: int = 0
    reducer_wait_ns: int = 0
    """How long the stream has waited for DDP's reducer since the last phase of the device."""
    device_lag_ns: int = 0
    """How much later than the host the device came to the end of its last phase."""
    device_steps: int = 0
    """How many of these the device has ended."""
    exposed_ns: int = 0
    micro_steps: int = 0
    skipped: int = 0
    activities: defaultdict[tuple[codes.Phase, codes.Activity, bool], ActivityTotals] = field(
        default_factory=lambda: defaultdict(ActivityTotals)
    )
    """(phase, what it did, in the background?) -> totals, set-up included."""
    ledger: LedgerSums = field(default_factory=LedgerSums)
    scalars: dict[codes.Scalar, ScalarTotals] = field(default_factory=dict)
    batches: BatchTotals = field(default_factory=BatchTotals)
    out_of_batches: bool = False
    """True if its DataLoader had no more when a batch was last asked for."""
    loading: events.Loading | None = None
    loading_read: events.LoadingRead | None = None
    setup_ns: list[int] = field(default_factory=zeros_by_phase)
    """Nanoseconds of :attr:`startup_ns`, by phase."""
    pipeline: PipelineCalls = field(default_factory=PipelineCalls)
    engines: defaultdict[int, EngineTotals] = field(default_factory=lambda: defaultdict(EngineTotals))
    gathers: dict[bool, list[int]] = field(default_factory=dict)
    """Issued ahead? -> unsharded bytes and exposed nanoseconds of the gathers."""
    transfers: defaultdict[codes.Path, PathTotals] = field(
        default_factory=lambda: defaultdict(PathTotals)
    )
    roles: dict[codes.Role, events.RoleBytes] = field(default_factory=dict)
    first_roles: dict[codes.Role, int] = field(default_factory=dict)
    """Bytes on device and host at the first census after the warm-up."""
    unsharded: dict[int, int] = field(default_factory=dict)
    """Unit -> bytes that are gathered now."""
    unsharded_now: int = 0
    unsharded_peak: int = -1
    """Peak of *unsharded_now*; -1 while no unit has reported its size."""

    memory: events.MemorySample | None = None
    allocated_peaks: deque[events.AllocatedPeak] = field(default_factory=lambda: deque(maxlen=_PEAKS))
    memory_peak: events.MemoryPeak | None = None
    reserved_at_peak: int = 0
    """Reserved bytes when *memory_peak* was read."""
    host: events.HostSample | None = None
    available_bytes: int = -1
    pinned_bytes: int = -1
    oom: events.Oom | None = None
    new_ooms: int = 0
    """Since the last :class:`MemoryPeak`, whose own count has the earlier ones."""

    trace: events.TraceMark | None = None
    trial: events.TrialMark | None = None
    """The newest of a trial, with the cost of all its switches."""
    errors: int = 0
    dropped: int = 0
    exit: events.Exit | None = None

    window: Window = field(default_factory=Window)
    on_device: bool = False
    """True if steps and phases are those of a device's compute stream."""
    device_window: Window = field(default_factory=Window)
    """Phases and communication of a device in the step that it is in."""
    enqueued: deque[tuple[events.StepMark, Window]] = field(default_factory=deque)
    """Steps that the host has ended and the device has not."""
    loop_ns: int = 0
    """When the training loop began."""
    recorded_ns: int = 0
    """The end of the newest step in :attr:`history`."""
    last_windows: deque[Window] = field(default_factory=lambda: deque(maxlen=LAST_WINDOWS))
    """Those of the last steps of :attr:`history`, in their order."""
    beats: deque[Spent] = field(default_factory=lambda: deque(maxlen=_BEATS))
    """The agent's totals at each of its last heartbeats."""
    idle_pairs: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_PAIRS))
    """(an idle step, the mean of its two neighbours), nanoseconds."""

    def group_label(self, group: int) -> str:
        """The display name of a group; "unknown" without one."""
        return str(self.groups.get(group, {}).get("label", "unknown"))

    def group_size(self, group: int) -> int:
        """Ranks in a group; 1 when it is unknown."""
        return int(self.groups.get(group, {}).get("size", 1))

    def note_group_facts(self, group: int, facts: dict[str, Any]) -> None:
        """Notes the *facts* of a group; rows that its first calls have made before get its size.

        A fact of another type than the agents write, from a damaged or hostile ring, is unknown.
        """
        checks = {"size": _is_valid_count, "nodes": _is_valid_count, "ranks": _are_valid_ranks}
        self.groups[group] = {
            name: fact for name, fact in facts.items() if name not in checks or checks[name](fact)
        }
        for (op, of, _, _), row in self.traffic.items():
            if of == group:
                row.set_group_size(op, self.group_size(group))

    def group_id(self, group: int) -> str:
        """A name of a group that is the same on all members: its label, its own name, and its ranks."""
        facts = self.groups.get(group, {})
        ranks = ",".join(str(r) for r in facts.get("ranks", ())[:_MAX_ID_CHARS])  # more have no room
        return f"{facts.get('label', '?')}/{facts.get('name', '')}/{ranks}"[:_MAX_ID_CHARS]

    def stats_row(self, op: codes.Op, group: int, phase: codes.Phase, unit: int) -> CollectiveStats:
        """Returns the sums of one row of communication; makes them at the first call."""
        row = self.traffic.get((op, group, phase, unit))
        if row is None:
            totals = self.ops[op, group]
            row = CollectiveStats(op, self.group_size(group), self.timed_steps, totals)
            self.traffic[op, group, phase, unit] = row
            if unit:
                self.unit_groups[op, unit] = group
        return row

    def _sent_dimensions(self) -> list[strategy.DimensionMetadata]:
        return strategy.parse_dimension_metadata(self.meta.get("dimensions"))

    def dimension_names(self) -> dict[int, str]:
        """Group -> the name of its dimension: as the agent found it, else by the label of the group."""
        named = {number: strategy.dim_name_of(self.group_label(number)) for number in self.groups}
        for sent in self._sent_dimensions():
            named |= dict.fromkeys(sent["groups"], sent["name"])
        return named

    def rank_dimensions(self) -> tuple[Dimension, ...]:
        """Returns the dimensions of the rank, each with the largest of its groups."""
        by_name = {
            sent["name"]: Dimension(
                name=sent["name"], size=sent["size"], nodes=sent["nodes"], used=sent["used"]
            )
            for sent in self._sent_dimensions()
        }
        for number, name in self.dimension_names().items():
            dimension = by_name.get(name) or Dimension(name=name)
            by_name[name] = replace(
                dimension,
                size=max(dimension.size, self.group_size(number)),
                nodes=max(dimension.nodes, int(self.groups.get(number, {}).get("nodes", 0))),
                used=True,
            )
        return tuple(by_name.values())

    def strategy_label(self, fields: strategy.Strategy) -> str:
        """The label of strategy *fields*; the agent's own where this version does not know it."""
        unwrapped = strategy.ONE_PROCESS if self.meta.get("world_size") == 1 else fields.label
        return (
            fields.label if fields != strategy.Strategy() else str(self.meta.get("strategy", unwrapped))
        )

    @property
    def on_virtual_device(self) -> bool:
        """True in a preflight: what this host's cores make of times says nothing of the run."""
        return str(self.meta.get("device_name", "")).endswith(VIRTUAL)

    def rank_strategy(self, dims: Iterable[Dimension]) -> strategy.Strategy:
        """The strategy that the agent sent, with those of the rank's *dims* that split the model."""
        used = {strategy.dim_by_name(dim.name) for dim in dims if dim.used and dim.size > 1}
        split_dims = tuple(dim for dim in strategy.MODEL_PARALLEL if dim in used)
        return replace(strategy.Strategy.read(self.meta), parts=split_dims)


def _is_valid_count(fact: object) -> bool:
    # By isinstance(), true in a damaged ring is a size of 1
    return type(fact) is int and 0 <= fact < 1 << 32


def _are_valid_ranks(fact: object) -> bool:
    return isinstance(fact, list) and all(map(_is_valid_count, fact))


_E = TypeVar("_E", bound=events.Event)
_Handler = Callable[[RankState, _E], None]

HANDLERS: dict[type, Callable[[RankState, Any], None]] = {}
"""Type of an event -> the function that changes a state by it."""


def folds_event(event: type[_E]) -> Callable[[_Handler[_E]], _Handler[_E]]:
    """Registers the function below as the one that folds every *event*."""

    def register_handler(handler: _Handler[_E]) -> _Handler[_E]:
        HANDLERS[event] = handler
        return handler

    return register_handler
