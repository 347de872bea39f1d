"""Events in, meaning out: the fold that every view, replay and report goes through.

:class:`RankState` is what is known of one rank; :func:`fold` updates it with one event (in place: a
node folds tens of thousands of events a second); :func:`summarize` turns it into a frozen
:class:`RankSnapshot`. Times are nanoseconds of CLOCK_MONOTONIC, sizes bytes, ratios 0..1.
Nothing here reads a clock or a file.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zeromon.comms import busbw, overlap_ratio
from zeromon.events import (
    BackwardComm,
    Beat,
    Bucket,
    Counted,
    Done,
    Dtype,
    Event,
    Exit,
    Flag,
    GroupSequence,
    HostSample,
    Issued,
    MemoryPeak,
    MemorySample,
    Oom,
    Op,
    Outcome,
    Path,
    Phase,
    PhaseSpan,
    Precision,
    Role,
    RoleBytes,
    Stall,
    StepMark,
    TraceMark,
    Transfer,
    UnitEvent,
    UnitMark,
)
from zeromon.expected import expected_rows
from zeromon.intervals import Interval, intersection, length, union
from zeromon.snapshot import (
    RECENT_STEPS,
    CollectiveRow,
    DeviceMemory,
    EngineRow,
    GatherRow,
    GroupProgress,
    InFlight,
    OutOfMemory,
    RankCapture,
    RankSnapshot,
    RoleRow,
    Setting,
    StepSummary,
    TransferRow,
    UnitRow,
)
from zeromon.traffic import (
    BUSY,
    CALLS,
    EXPOSED,
    NBYTES,
    SIZE_BOUNDS,
    TIMED_BYTES,
    Key,
    Traffic,
    serial_spans,
    size_bucket,
    size_rows,
)
from zeromon.traffic import rows as traffic_rows

STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the step-time histogram, seconds."""

_INFERRED = int(Flag.INFERRED)
_FAILED = int(Flag.FAILED)  # an IntFlag's own `&` takes a microsecond
_AHEAD = int(Flag.AHEAD)
_QUANTIZED = frozenset((Dtype.INT8, Dtype.FLOAT8_E4M3FN, Dtype.FLOAT8_E5M2))
_QUANTIZED_OPS = frozenset((Op.ALL_GATHER, Op.ALL_TO_ALL, Op.REDUCE_SCATTER))
_WINDOW = 20
_MOST_IN_FLIGHT = 4096
_MOST_ARRIVALS = 8192
_NONE_ISSUED = (-1, Op.NONE, 0)
_LONGEST_FRAME = 240
_PAIRS = 128
_WARM_UP = 5


class Arrival(NamedTuple):
    """A collective of a rank, for its reader to match with the other ranks'."""

    group: int
    sequence: int
    start_ns: int
    busy_ns: int
    step: int
    timed_step: int
    """By the numbers of :class:`~zeromon.traffic.Traffic`."""
    nbytes: int
    traffic: Traffic


@dataclass(slots=True)
class OpTotals:
    """Running totals of one operation in one group."""

    count: int = 0
    timed: int = 0
    nbytes: int = 0
    quantized_bytes: int = 0
    duration_ns: int = 0
    exposed_ns: int = 0
    recent_bytes: float = 0.0
    recent_ns: float = 0.0
    best_busbw: float = 0.0


@dataclass(slots=True)
class UnitTotals:
    """Running totals of one FSDP unit."""

    unshards: int = 0
    reshards: int = 0
    exposed_ns: int = 0
    peak_allocated_bytes: int = -1
    late_bytes: int = 0
    ahead_bytes: int = 0


@dataclass(slots=True)
class EngineTotals:
    """Running totals of one DeepSpeed engine."""

    steps: int = 0
    skipped: int = 0
    collectives: int = 0
    nbytes: int = 0
    exposed_ns: int = 0
    precision: Precision | None = None
    nonfinite: int = 0


@dataclass(slots=True)
class PathTotals:
    """Running totals of one way of offloaded state."""

    nbytes: int = 0
    busy_ns: int = 0
    blocked_ns: int = 0
    recent_bytes: float = 0.0
    recent_ns: float = 0.0
    best: float = 0.0
    """Bytes a nanosecond."""
    of_step: int = 0
    """Bytes since the step began."""
    step_bytes: float | None = None


@dataclass(slots=True)
class _Window:
    """What has been collected since the step began."""

    communication: list[Interval] = field(default_factory=list)
    blocked: list[Interval] = field(default_factory=list)
    phase_ns: list[int] = field(default_factory=lambda: [0] * len(Phase))
    phase_exposed_ns: list[int] = field(default_factory=lambda: [0] * len(Phase))
    collectives: int = 0
    nbytes: int = 0
    stall_ns: int = 0
    allocated: int = -1
    reserved: int = -1
    rss: int = -1
    offload_ns: int = 0
    late_ns: int = 0
    micro_steps: int = 0


@dataclass(slots=True)
class RankState:
    """All that is known of one rank. Changed by :func:`fold`, and by its reader."""

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
    phase: Phase = Phase.OTHER
    unit: int = 0
    first_event_ns: int = 0
    last_event_ns: int = 0

    history: deque[StepSummary] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    step_bucket_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    step_ns: int = 0
    phase_ns: list[int] = field(default_factory=lambda: [0] * len(Phase))
    ops: dict[tuple[Op, int], OpTotals] = field(default_factory=dict)
    untimed: dict[int, int] = field(default_factory=dict)
    unattributed: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, tuple[int, int]] = field(default_factory=dict)
    unit_totals: dict[int, UnitTotals] = field(default_factory=dict)
    in_flight: dict[tuple[int, int], Issued] = field(default_factory=dict)
    last_done: dict[int, int] = field(default_factory=dict)
    arrivals: deque[Arrival] = field(default_factory=lambda: deque(maxlen=_MOST_ARRIVALS))
    """Collectives that have ended since a reader took them."""
    traffic: dict[Key, Traffic] = field(default_factory=dict)
    sizes: dict[Op, list[int]] = field(default_factory=dict)
    """Operation -> calls by size, then bytes, of what was counted and not timed."""
    buckets: list[Bucket] = field(default_factory=list)
    """DDP's, of a backward of which the end has not come."""
    unit_groups: dict[tuple[Op, int], int] = field(default_factory=dict)
    """(operation, unit) -> the group that it communicates in."""
    timed_steps: int = 0
    last_issued: dict[int, tuple[int, Op, int]] = field(default_factory=dict)
    """Group -> sequence number, operation and bytes of the last collective issued in it."""
    exposed_ns: int = 0
    micro_steps: int = 0
    skipped: int = 0
    engines: dict[int, EngineTotals] = field(default_factory=dict)
    gathers: dict[bool, list[int]] = field(default_factory=dict)
    """Unsharded bytes and exposed nanoseconds of gathers; by whether they were issued ahead."""
    transfers: dict[Path, PathTotals] = field(default_factory=dict)
    roles: dict[Role, RoleBytes] = field(default_factory=dict)
    first_roles: dict[Role, int] = field(default_factory=dict)
    """Bytes on device and host at the first census after the warm-up."""
    unsharded: dict[int, int] = field(default_factory=dict)
    """Bytes that are gathered now, by unit."""
    unsharded_now: int = 0
    unsharded_peak: int = -1
    """The most at once so far; -1 while no unit said its size."""

    memory: MemorySample | None = None
    memory_peak: MemoryPeak | None = None
    reserved_at_peak: int = 0
    """Reserved bytes when *memory_peak* was read."""
    host: HostSample | None = None
    available_bytes: int = -1
    pinned_bytes: int = -1
    oom: Oom | None = None

    trace: TraceMark | None = None
    errors: int = 0
    dropped: int = 0
    exit: Exit | None = None

    window: _Window = field(default_factory=_Window)
    last_window: _Window = field(default_factory=_Window)
    idle_pairs: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_PAIRS))
    """(an idle step, the mean of its two neighbours), nanoseconds."""


# ---- fold ----------------------------------------------------------------------------------------


def fold(state: RankState, event: Event) -> RankState:
    """*state* after *event*; the same object."""
    if event.t_ns > state.last_event_ns:
        state.last_event_ns = event.t_ns
    if not state.first_event_ns:
        state.first_event_ns = event.t_ns
    _FOLDERS[type(event)](state, event)
    return state


def operation_totals(state: RankState, op: Op, group: int) -> OpTotals:
    """The totals of an operation in a group, made when they are new."""
    totals = state.ops.get((op, group))
    if totals is None:
        totals = state.ops[op, group] = OpTotals()
    return totals


def _fold_issued(state: RankState, e: Issued) -> None:
    if e.flags & _INFERRED:  # counted elsewhere: shown because its step does not end
        state.in_flight[e.group, e.sequence] = e
        return
    row = state.traffic.get((e.op, e.group, e.phase, e.unit))
    if row is None:
        row = traffic_row(state, e.op, e.group, e.phase, e.unit)
    totals = row.totals
    totals.count += 1
    totals.nbytes += e.nbytes
    if e.dtype in _QUANTIZED and e.op in _QUANTIZED_OPS:
        totals.quantized_bytes += e.nbytes
    if e.engine:
        engine = _engine(state, e.engine)
        engine.collectives += 1
        engine.nbytes += e.nbytes
    state.window.collectives += 1
    state.window.nbytes += e.nbytes
    if e.sequence > state.last_issued.get(e.group, _NONE_ISSUED)[0]:
        state.last_issued[e.group] = (e.sequence, e.op, e.nbytes)
    row.called(e.nbytes)
    now = row.now if row.step == state.timed_steps else row.at(state.timed_steps)
    now[CALLS] += 1
    now[NBYTES] += e.nbytes
    state.phase = e.phase
    state.unit = e.unit
    if len(state.in_flight) < _MOST_IN_FLIGHT:
        state.in_flight[e.group, e.sequence] = e


def traffic_row(state: RankState, op: Op, group: int, phase: Phase, unit: int) -> Traffic:
    """The sums of one row of communication, made when they are new."""
    row = state.traffic.get((op, group, phase, unit))
    if row is None:
        totals = operation_totals(state, op, group)
        row = Traffic(op, group_size(state, group), state.timed_steps, totals)
        state.traffic[op, group, phase, unit] = row
        if unit:
            state.unit_groups[op, unit] = group
    return row


def _sized(state: RankState, op: Op, calls: int, nbytes: int) -> None:
    """Counts calls of one size each that belong to no row."""
    counts = state.sizes.get(op)
    if counts is None:
        counts = state.sizes[op] = [0] * (len(SIZE_BOUNDS) + 2)
    counts[size_bucket(nbytes // calls)] += calls
    counts[-1] += nbytes


def _fold_done(state: RankState, e: Done) -> None:
    issued = state.in_flight.pop((e.group, e.sequence), None)
    if e.sequence > state.last_done.get(e.group, 0):
        state.last_done[e.group] = e.sequence
    if e.flags & _FAILED:
        return
    row = state.traffic.get((e.op, e.group, e.phase, e.unit))
    if row is None:
        row = traffic_row(state, e.op, e.group, e.phase, e.unit)
    totals = row.totals
    duration = e.t_ns - e.issued_ns if e.t_ns > e.issued_ns else 0
    totals.timed += 1
    totals.duration_ns += duration
    totals.exposed_ns += e.blocked_ns
    totals.recent_bytes += e.nbytes
    totals.recent_ns += duration
    row.exposed_ns += e.blocked_ns
    now = row.now if row.step == state.timed_steps else row.at(state.timed_steps)
    now[TIMED_BYTES] += e.nbytes
    now[BUSY] += duration
    now[EXPOSED] += e.blocked_ns
    if e.sequence > 0:  # what goes from one rank to another is not numbered by the group
        step = state.step + 1 if e.issued_ns >= state.step_end_ns else state.step
        state.arrivals.append(
            Arrival(
                e.group, e.sequence, e.issued_ns, duration, step, state.timed_steps, e.nbytes, row
            )
        )
    window = state.window
    window.communication.append((e.issued_ns, e.t_ns))
    if e.blocked_ns:
        window.blocked.append((e.t_ns - e.blocked_ns, e.t_ns))
        window.phase_exposed_ns[e.phase] += e.blocked_ns
    state.exposed_ns += e.blocked_ns
    if issued is not None and issued.engine:
        _engine(state, issued.engine).exposed_ns += e.blocked_ns
    if e.unit:
        _unit(state, e.unit).exposed_ns += e.blocked_ns
        if e.op is Op.ALL_GATHER and state.gathers:
            ahead = bool(e.flags & _AHEAD)
            state.gathers.setdefault(ahead, [0, 0])[1] += e.blocked_ns
            if not ahead:
                window.late_ns += e.blocked_ns


def _engine(state: RankState, number: int) -> EngineTotals:
    totals = state.engines.get(number)
    if totals is None:
        totals = state.engines[number] = EngineTotals()
    return totals


def _fold_counted(state: RankState, e: Counted) -> None:
    state.untimed[e.group] = state.untimed.get(e.group, 0) + e.calls
    if e.op is Op.NONE:
        state.unattributed[e.group] = state.unattributed.get(e.group, 0) + e.calls
        return
    totals = operation_totals(state, e.op, e.group)
    totals.count += e.calls
    totals.nbytes += e.nbytes
    if e.calls > 0 and not e.observed:  # of a step with idle hooks only the sum is known
        _sized(state, e.op, e.calls, e.nbytes)
    if e.dtype in _QUANTIZED and e.op in _QUANTIZED_OPS:
        totals.quantized_bytes += e.nbytes
    if e.engine:
        engine = _engine(state, e.engine)
        engine.collectives += e.calls
        engine.nbytes += e.nbytes
    state.window.collectives += e.calls
    state.window.nbytes += e.nbytes


def _fold_phase(state: RankState, e: PhaseSpan) -> None:
    spent = max(0, e.t_ns - e.start_ns)
    state.phase_ns[e.phase] += spent
    state.window.phase_ns[e.phase] += spent
    if e.phase is Phase.BACKWARD:
        state.micro_steps += 1
        state.window.micro_steps += 1
        _all_resharded(state)
    state.phase = Phase.OTHER


def _fold_step(state: RankState, e: StepMark) -> None:
    previous = state.history[-1] if state.history else None
    continued = bool(e.flags & Flag.CONTINUED) and previous is not None
    window, state.last_window = state.window, state.window
    state.window = _Window()
    start = previous.start_ns if continued and previous else e.start_ns
    summary = _step_summary(state, e, start, window)
    spent = e.t_ns - e.start_ns
    skipped = e.outcome is Outcome.SKIPPED
    state.skipped += skipped
    if e.engine:
        engine = _engine(state, e.engine)
        engine.steps += 1
        engine.skipped += skipped
    state.step_ns += spent
    state.phase_ns[Phase.OTHER] += max(0, spent - sum(window.phase_ns[1:]))
    if continued and previous:
        state.history[-1] = _joined(previous, summary)
    else:
        state.history.append(summary)
        # a collector that was started again may have missed the first ones
        before = state.meta.get("steps_before", 0)  # of a run that was joined
        state.step, state.steps = e.step, max(state.steps + 1, e.step - int(before))
        state.step_end_ns = e.t_ns
        state.timed_steps += not summary.idle
        state.step_bucket_counts[_bucket(summary.seconds)] += 1
        _pair_idle(state)
    state.phase = Phase.OTHER
    state.unit = 0
    _all_resharded(state)
    if state.in_flight:
        _forget_ended(state, start)
    for (op, group), totals in state.ops.items():
        bandwidth = recent_busbw(op, totals, group_size(state, group))
        totals.best_busbw = max(totals.best_busbw, bandwidth or 0.0)
        totals.recent_bytes *= 0.8
        totals.recent_ns *= 0.8
    for way in state.transfers.values():
        if way.recent_ns >= 1:
            way.best = max(way.best, way.recent_bytes / way.recent_ns)
        before = way.of_step if way.step_bytes is None else way.step_bytes
        way.step_bytes, way.of_step = 0.8 * before + 0.2 * way.of_step, 0
        way.recent_bytes *= 0.8
        way.recent_ns *= 0.8


def _forget_ended(state: RankState, step_start_ns: int) -> None:
    """Drops what cannot be in flight any more.

    A collective that nobody waited for leaves no DONE. It has ended when a later one of its group has
    ended (groups run in order) and its step is over; one inferred in an idle step ended with it.
    """
    state.in_flight = {
        key: e
        for key, e in state.in_flight.items()
        if not e.flags & _INFERRED
        and (e.t_ns >= step_start_ns or e.sequence > state.last_done.get(e.group, 0))
    }


def _step_summary(state: RankState, e: StepMark, start: int, window: _Window) -> StepSummary:
    communication = union(window.communication)
    exposed = intersection(union(window.blocked), communication)
    phases = list(window.phase_ns)
    phases[Phase.OTHER] = max(0, e.t_ns - e.start_ns - sum(phases[1:]))
    memory, host = state.memory, state.host
    return StepSummary(
        step=e.step,
        start_ns=start,
        end_ns=e.t_ns,
        idle=bool(e.flags & Flag.IDLE),
        micro_steps=e.micro_steps,
        phase_ns=tuple(phases),
        collectives=window.collectives,
        collective_bytes=window.nbytes,
        communication_ns=length(communication),
        exposed_ns=length(exposed) + window.stall_ns,
        allocated_bytes=max(window.allocated, memory.allocated_bytes if memory else -1),
        reserved_bytes=max(window.reserved, memory.reserved_bytes if memory else -1),
        rss_bytes=max(window.rss, host.rss_bytes if host else -1),
        skipped=e.outcome is Outcome.SKIPPED,
        offload_blocked_ns=window.offload_ns,
        phase_exposed_ns=tuple(window.phase_exposed_ns),
        late_gather_ns=window.late_ns,
        other_bytes=_other_bytes(state),
    )


def _other_bytes(state: RankState) -> int:
    """What the driver counts on the device beside what the allocator had reserved then."""
    device = state.memory_peak
    if device is None or device.free_bytes < 0 or device.capacity_bytes < 0:
        return -1
    return max(0, device.capacity_bytes - device.free_bytes - state.reserved_at_peak)


def _joined(first: StepSummary, second: StepSummary) -> StepSummary:
    """Two optimizers of one step: one summary."""
    return StepSummary(
        step=first.step,
        start_ns=first.start_ns,
        end_ns=second.end_ns,
        idle=first.idle,
        micro_steps=first.micro_steps,
        phase_ns=tuple(a + b for a, b in zip(first.phase_ns, second.phase_ns, strict=True)),
        collectives=first.collectives + second.collectives,
        collective_bytes=first.collective_bytes + second.collective_bytes,
        communication_ns=first.communication_ns + second.communication_ns,
        exposed_ns=first.exposed_ns + second.exposed_ns,
        allocated_bytes=max(first.allocated_bytes, second.allocated_bytes),
        reserved_bytes=max(first.reserved_bytes, second.reserved_bytes),
        rss_bytes=max(first.rss_bytes, second.rss_bytes),
        skipped=first.skipped or second.skipped,
        offload_blocked_ns=first.offload_blocked_ns + second.offload_blocked_ns,
        phase_exposed_ns=tuple(
            a + b for a, b in zip(first.phase_exposed_ns, second.phase_exposed_ns, strict=False)
        ),
        late_gather_ns=first.late_gather_ns + second.late_gather_ns,
        other_bytes=max(first.other_bytes, second.other_bytes),
    )


def _bucket(seconds: float) -> int:
    return next((i for i, bound in enumerate(STEP_BUCKETS) if seconds <= bound), len(STEP_BUCKETS))


def _pair_idle(state: RankState) -> None:
    """When the step after an idle one has come: the idle one beside the mean of its neighbours."""
    if len(state.history) < 3:
        return
    before, idle, after = state.history[-3], state.history[-2], state.history[-1]
    if idle.idle and not before.idle and not after.idle:
        neighbours = (before.end_ns - before.start_ns + after.end_ns - after.start_ns) // 2
        state.idle_pairs.append((idle.end_ns - idle.start_ns, neighbours))


def _fold_unit(state: RankState, e: UnitMark) -> None:
    unit = _unit(state, e.unit)
    state.phase = e.phase
    if e.event is UnitEvent.UNSHARD:
        unit.unshards += 1
        state.unit = e.unit
        _gathered(state, e)
        if e.nbytes:
            ahead = bool(e.flags & _AHEAD)
            state.gathers.setdefault(ahead, [0, 0])[0] += e.nbytes
            if ahead:
                unit.ahead_bytes += e.nbytes
            else:
                unit.late_bytes += e.nbytes
    elif e.event is UnitEvent.RESHARD:
        unit.reshards += 1
        state.unsharded_now -= state.unsharded.pop(e.unit, 0)
    if e.allocated_bytes >= 0:
        unit.peak_allocated_bytes = max(unit.peak_allocated_bytes, e.allocated_bytes)
        state.window.allocated = max(state.window.allocated, e.allocated_bytes)


def _gathered(state: RankState, e: UnitMark) -> None:
    """A unit is gathered. ZeRO-3 goes by parameters and says itself how much that makes."""
    if e.gathered_bytes:
        state.unsharded_now = e.gathered_bytes
    else:
        nbytes = state.unit_bytes.get(e.unit, 0)
        state.unsharded_now += nbytes - state.unsharded.get(e.unit, 0)
        state.unsharded[e.unit] = nbytes
    if state.unsharded_now:
        state.unsharded_peak = max(state.unsharded_peak, state.unsharded_now)


def _all_resharded(state: RankState) -> None:
    """After backward all is freed, by some backends without a word for each unit."""
    state.unsharded.clear()
    state.unsharded_now = 0


def _unit(state: RankState, number: int) -> UnitTotals:
    totals = state.unit_totals.get(number)
    if totals is None:
        totals = state.unit_totals[number] = UnitTotals()
    return totals


def _fold_memory(state: RankState, e: MemorySample) -> None:
    state.memory = e
    state.window.allocated = max(state.window.allocated, e.allocated_bytes)
    state.window.reserved = max(state.window.reserved, e.reserved_bytes)


def _fold_memory_peak(state: RankState, e: MemoryPeak) -> None:
    state.memory_peak = e
    state.reserved_at_peak = state.memory.reserved_bytes if state.memory else 0


def _fold_host(state: RankState, e: HostSample) -> None:
    state.host = e
    state.window.rss = max(state.window.rss, e.rss_bytes)
    if e.available_bytes >= 0:
        state.available_bytes = e.available_bytes
    if e.pinned_bytes >= 0:
        state.pinned_bytes = e.pinned_bytes


def _fold_sequence(state: RankState, e: GroupSequence) -> None:
    state.sequences[e.group] = (e.sequence, e.seen)


def _fold_beat(state: RankState, e: Beat) -> None:
    state.errors = e.errors
    state.phase = e.phase


def _fold_oom(state: RankState, e: Oom) -> None:
    state.oom = e


def _fold_exit(state: RankState, e: Exit) -> None:
    state.exit = e


def _fold_stall(state: RankState, e: Stall) -> None:
    state.window.stall_ns += e.blocked_ns
    state.exposed_ns += e.blocked_ns
    _unit(state, e.unit).exposed_ns += e.blocked_ns
    group = state.unit_groups.get((e.op, e.unit))
    if group is None:
        return
    operation_totals(state, e.op, group).exposed_ns += e.blocked_ns
    row = traffic_row(state, e.op, group, e.phase, e.unit)
    row.exposed_ns += e.blocked_ns
    row.at(state.timed_steps)[EXPOSED] += e.blocked_ns


def _fold_backward_comm(state: RankState, e: BackwardComm) -> None:
    """DDP's own timing of one backward; it arrives in the step after the one it belongs to."""
    totals = operation_totals(state, Op.ALL_REDUCE, e.group)
    totals.duration_ns += max(0, e.t_ns - e.start_ns)
    exposed = max(0, e.t_ns - max(e.compute_end_ns, e.start_ns))
    totals.exposed_ns += exposed
    _close_buckets(state, e)
    state.exposed_ns += exposed
    last = state.history[-1] if state.history else None
    belongs_to_last = last is not None and e.start_ns < last.end_ns
    window = state.last_window if belongs_to_last else state.window
    window.communication.append((e.start_ns, e.t_ns))
    window.blocked.append((max(e.compute_end_ns, e.start_ns), e.t_ns))
    window.phase_exposed_ns[Phase.BACKWARD] += exposed
    if last is not None and belongs_to_last:
        communication = union(window.communication)
        waits = intersection(union(window.blocked), communication)
        state.history[-1] = _with_communication(
            last, length(communication), length(waits), window.phase_exposed_ns
        )


def _fold_bucket(state: RankState, e: Bucket) -> None:
    if len(state.buckets) < _MOST_IN_FLIGHT:
        state.buckets.append(e)


def _close_buckets(state: RankState, e: BackwardComm) -> None:
    """Gives each bucket of a backward its time; see :func:`zeromon.traffic.serial_spans`."""
    buckets, state.buckets = sorted(state.buckets, key=lambda b: b.t_ns), []
    ready = [bucket.t_ns for bucket in buckets]
    spans = serial_spans(ready, [bucket.nbytes for bucket in buckets], e.t_ns)
    for bucket, (start, end) in zip(buckets, spans, strict=False):
        row = traffic_row(state, Op.ALL_REDUCE, bucket.group, Phase.BACKWARD, bucket.unit)
        exposed = max(0, end - max(start, e.compute_end_ns))
        row.calls += 1
        row.exposed_ns += exposed
        _unit(state, bucket.unit).exposed_ns += exposed
        now = row.at(state.timed_steps)
        for at, value in (
            (CALLS, 1), (NBYTES, bucket.nbytes), (TIMED_BYTES, bucket.nbytes),
            (BUSY, end - start), (EXPOSED, exposed),
        ):  # fmt: skip
            now[at] += value
        step = state.step if bucket.t_ns < state.step_end_ns else state.step + 1
        state.arrivals.append(
            Arrival(
                bucket.group,
                bucket.sequence,
                bucket.t_ns,
                end - start,
                step,
                state.timed_steps,
                bucket.nbytes,
                row,
            )
        )


def _with_communication(
    summary: StepSummary, communication: int, exposed: int, by_phase: list[int]
) -> StepSummary:
    return replace(
        summary,
        communication_ns=communication,
        exposed_ns=exposed,
        phase_exposed_ns=tuple(by_phase),
    )


def _fold_precision(state: RankState, e: Precision) -> None:
    engine = _engine(state, e.engine)
    engine.precision = e
    if e.grad_norm is not None and not math.isfinite(e.grad_norm):
        engine.nonfinite += 1


def _fold_trace(state: RankState, e: TraceMark) -> None:
    state.trace = e


def _fold_role(state: RankState, e: RoleBytes) -> None:
    state.roles[e.role] = e
    if state.steps >= _WARM_UP:
        state.first_roles.setdefault(e.role, e.device_bytes + e.host_bytes)


def _fold_transfer(state: RankState, e: Transfer) -> None:
    way = state.transfers.setdefault(e.path, PathTotals())
    way.nbytes += e.nbytes
    way.of_step += e.nbytes
    way.busy_ns += e.busy_ns
    way.blocked_ns += e.blocked_ns
    if e.busy_ns:
        way.recent_bytes += e.nbytes
        way.recent_ns += e.busy_ns
    state.window.offload_ns += e.blocked_ns


_FOLDERS: dict[type, Callable[[RankState, Any], None]] = {
    Issued: _fold_issued,
    Done: _fold_done,
    Counted: _fold_counted,
    PhaseSpan: _fold_phase,
    StepMark: _fold_step,
    UnitMark: _fold_unit,
    MemorySample: _fold_memory,
    MemoryPeak: _fold_memory_peak,
    HostSample: _fold_host,
    GroupSequence: _fold_sequence,
    Beat: _fold_beat,
    Oom: _fold_oom,
    Exit: _fold_exit,
    Stall: _fold_stall,
    BackwardComm: _fold_backward_comm,
    Bucket: _fold_bucket,
    TraceMark: _fold_trace,
    Precision: _fold_precision,
    RoleBytes: _fold_role,
    Transfer: _fold_transfer,
}


# ---- snapshot ------------------------------------------------------------------------------------


def group_label(state: RankState, group: int) -> str:
    """The name under which a group is shown."""
    return str(state.groups.get(group, {}).get("label", "unknown"))


def group_size(state: RankState, group: int) -> int:
    """Ranks in a group; 1 when it is unknown."""
    return int(state.groups.get(group, {}).get("size", 1))


def recent_busbw(op: Op, totals: OpTotals, size: int) -> float | None:
    """Bus bandwidth over the last steps, bytes/s."""
    return busbw(op, round(totals.recent_bytes), totals.recent_ns / 1e9, size)


def overhead(pairs: Iterable[tuple[int, int]]) -> tuple[float, float] | None:
    """What the agent costs, as a ratio of a step without it, and the noise of that figure.

    *pairs* are (idle step, mean of its neighbours). The figure is the median of the ratios; the
    noise is the standard error of a median, 1.253 s / sqrt(n), with s from the median absolute
    deviation (1.4826 MAD), so that a checkpoint in between does not spoil it.
    """
    ratios = [neighbours / idle - 1 for idle, neighbours in pairs if idle > 0]
    if len(ratios) < 5:
        return None
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(r - middle) for r in ratios)
    return middle, 1.253 * deviation / len(ratios) ** 0.5


def summarize(
    state: RankState, *, alive: bool, ended: str = "", failed: bool = False
) -> RankSnapshot:
    """The frozen picture of *state*."""
    timed = [s for s in list(state.history)[-_WINDOW:] if not s.idle]
    communication = sum(s.communication_ns for s in timed)
    exposed = sum(s.exposed_ns for s in timed)
    spent = sum(s.end_ns - s.start_ns for s in timed)
    cost = overhead(state.idle_pairs)
    meta = state.meta
    recent = list(state.history)[-_WINDOW:]
    roles, models = _role_rows(state), _models(state)
    return RankSnapshot(
        rank=state.rank,
        local_rank=int(meta.get("local_rank", 0)),
        world_size=int(meta.get("world_size", 1)),
        pid=state.pid,
        node=str(meta.get("node", "")),
        device=str(meta.get("device", "cpu")),
        strategy=str(meta.get("strategy", "unknown")),
        alive=alive,
        ended=ended,
        failed=failed,
        exception=_exception(state),
        stack=_stack(state),
        step=state.step,
        steps=state.steps,
        step_seconds=statistics.median(s.seconds for s in recent) if recent else None,
        steps_seconds_total=state.step_ns / 1e9,
        step_buckets=tuple(state.step_bucket_counts),
        phase=state.phase.label,
        unit=state.units.get(state.unit, ""),
        phase_seconds={phase.label: state.phase_ns[phase] / 1e9 for phase in Phase},
        collectives=_collective_rows(state),
        untimed=_by_label(state, state.untimed),
        unattributed=_by_label(state, state.unattributed),
        overlap_ratio=overlap_ratio(communication, exposed),
        exposed_ratio=exposed / spent if spent else None,
        exposed_seconds=exposed / len(timed) / 1e9 if timed else None,
        in_flight=_in_flight_rows(state),
        units=_unit_rows(state),
        memory=_device_memory(state),
        rss_bytes=state.host.rss_bytes if state.host else -1,
        host_available_bytes=state.available_bytes,
        pinned_bytes=state.pinned_bytes,
        dropped=state.dropped,
        errors=state.errors,
        overhead_ratio=cost[0] if cost else None,
        overhead_noise_ratio=cost[1] if cost else None,
        started_ns=state.first_event_ns,
        last_event_ns=state.last_event_ns,
        recent=tuple(state.history),
        micro_steps=state.micro_steps,
        backwards_since_step=state.window.micro_steps,
        skipped_steps=state.skipped,
        engines=_engine_rows(state),
        settings=_settings(state),
        gathers=tuple(
            GatherRow(
                outcome="ahead" if ahead else "late",
                nbytes=nbytes,
                exposed_seconds=exposed / 1e9,
            )
            for ahead, (nbytes, exposed) in sorted(state.gathers.items())
        ),
        transfers=tuple(_transfer_row(path, way) for path, way in sorted(state.transfers.items())),
        roles=roles,
        groups=_group_rows(state),
        traffic=traffic_rows(
            state.traffic,
            state.timed_steps,
            {
                number: (group_label(state, number), int(facts.get("nodes", 0)))
                for number, facts in state.groups.items()
            },
            state.units,
        ),
        sizes=size_rows(state.sizes, state.traffic),
        capture=_capture(state),
        loader=_facts_of(state, "loader"),
        models=tuple(models),
        planned=_facts_of(state, "planned"),
        expected=expected_rows(models, roles, state.unsharded_peak, state.steps),
        unsharded_peak_bytes=state.unsharded_peak,
        out_of_memory=_out_of_memory(state),
        unseen=tuple(str(name) for name in meta.get("unseen", ())),
    )


def _role_rows(state: RankState) -> tuple[RoleRow, ...]:
    return tuple(
        RoleRow(
            role=role.label,
            device_bytes=found.device_bytes,
            host_bytes=found.host_bytes,
            disk_bytes=found.disk_bytes,
            pinned_bytes=found.pinned_bytes,
            grown_bytes=found.device_bytes
            + found.host_bytes
            - state.first_roles.get(role, found.device_bytes + found.host_bytes),
        )
        for role, found in sorted(state.roles.items())
    )


def _models(state: RankState) -> list[dict[str, Any]]:
    """What the rank told of its models: those of torch, and those of DeepSpeed's engines."""
    told = state.meta.get("models")
    models = [facts for facts in told if isinstance(facts, dict)] if isinstance(told, list) else []
    for key in sorted(state.meta):
        if key.startswith("engine") and isinstance(state.meta[key], dict):
            facts = state.meta[key].get("model")
            if isinstance(facts, dict):
                models.append(facts)
    return models


def _facts_of(state: RankState, name: str) -> dict[str, Any]:
    facts = state.meta.get(name)
    return facts if isinstance(facts, dict) else {}


def _engine_facts(state: RankState, number: int) -> dict[str, Any]:
    return _facts_of(state, f"engine{number}")


def _engine_rows(state: RankState) -> tuple[EngineRow, ...]:
    return tuple(
        EngineRow(
            engine=number,
            strategy=str(_engine_facts(state, number).get("strategy", "")),
            steps=totals.steps,
            skipped=totals.skipped,
            collectives=totals.collectives,
            nbytes=totals.nbytes,
            exposed_seconds=totals.exposed_ns / 1e9,
            loss_scale=_finite(totals.precision.loss_scale) if totals.precision else None,
            hysteresis=totals.precision.hysteresis if totals.precision else -1,
            grad_norm=_finite(totals.precision.grad_norm) if totals.precision else None,
            nonfinite=totals.nonfinite,
        )
        for number, totals in sorted(state.engines.items())
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _settings(state: RankState) -> tuple[Setting, ...]:
    """Of every engine that told its configuration; malformed rows are left out."""
    found = []
    numbers = {int(k[6:]) for k in state.meta if k.startswith("engine") and k[6:].isdigit()}
    for number in sorted(numbers):
        for row in _engine_facts(state, number).get("settings", ()):
            if isinstance(row, list) and len(row) == 3:
                name, effective, written = (str(part) for part in row)
                found.append(
                    Setting(engine=number, name=name, effective=effective, written=written)
                )
    return tuple(found)


def _transfer_row(path: Path, way: PathTotals) -> TransferRow:
    return TransferRow(
        path=path.label,
        nbytes=way.nbytes,
        seconds=way.busy_ns / 1e9,
        blocked_seconds=way.blocked_ns / 1e9,
        bytes_per_second=way.recent_bytes / way.recent_ns * 1e9 if way.recent_ns >= 1 else None,
        best_bytes_per_second=way.best * 1e9,
        step_bytes=way.step_bytes or 0.0,
    )


def _out_of_memory(state: RankState) -> OutOfMemory | None:
    oom = state.oom
    if oom is None:
        return None
    return OutOfMemory(
        requested_bytes=oom.requested_bytes,
        free_bytes=oom.free_bytes,
        total_bytes=oom.total_bytes,
        largest_block_bytes=oom.largest_block_bytes,
    )


def _capture(state: RankState) -> RankCapture | None:
    mark = state.trace
    if mark is None:
        return None
    return RankCapture(
        request=mark.request, state=mark.state.label, why=state.texts.get(mark.text, "")
    )


def _exception(state: RankState) -> str:
    """The exception that ended the rank."""
    return state.texts.get(state.exit.text, "") if state.exit else ""


def _by_label(state: RankState, counts: dict[int, int]) -> dict[str, int]:
    """Counts by group label; groups that share one are added up."""
    found: dict[str, int] = {}
    for group, count in counts.items():
        label = group_label(state, group)
        found[label] = found.get(label, 0) + count
    return found


def _collective_rows(state: RankState) -> tuple[CollectiveRow, ...]:
    """One row per operation and group label; groups that share a label are added up."""
    rows: dict[tuple[str, str], CollectiveRow] = {}
    for (op, group), totals in sorted(state.ops.items()):
        size = group_size(state, group)
        row = CollectiveRow(
            op=op.label,
            group=group_label(state, group),
            group_size=size,
            count=totals.count,
            timed=totals.timed,
            nbytes=totals.nbytes,
            quantized_bytes=totals.quantized_bytes,
            nodes=int(state.groups.get(group, {}).get("nodes", 0)),
            seconds=totals.duration_ns / 1e9,
            exposed_seconds=totals.exposed_ns / 1e9,
            busbw_bytes_per_second=recent_busbw(op, totals, size),
            best_busbw_bytes_per_second=totals.best_busbw,
        )
        key = (row.op, row.group)
        rows[key] = _added(rows[key], row) if key in rows else row
    return tuple(rows.values())


def _added(first: CollectiveRow, second: CollectiveRow) -> CollectiveRow:
    return CollectiveRow(
        op=first.op,
        group=first.group,
        group_size=first.group_size,
        count=first.count + second.count,
        timed=first.timed + second.timed,
        nbytes=first.nbytes + second.nbytes,
        quantized_bytes=first.quantized_bytes + second.quantized_bytes,
        nodes=max(first.nodes, second.nodes),
        seconds=first.seconds + second.seconds,
        exposed_seconds=first.exposed_seconds + second.exposed_seconds,
        busbw_bytes_per_second=first.busbw_bytes_per_second or second.busbw_bytes_per_second,
        best_busbw_bytes_per_second=max(
            first.best_busbw_bytes_per_second, second.best_busbw_bytes_per_second
        ),
    )


def _in_flight_rows(state: RankState) -> tuple[InFlight, ...]:
    oldest = sorted(state.in_flight.values(), key=lambda e: e.t_ns)[:16]
    return tuple(
        InFlight(
            op=e.op.label,
            group=group_label(state, e.group),
            sequence=e.sequence,
            unit=state.units.get(e.unit, ""),
            phase=e.phase.label,
            nbytes=e.nbytes,
            issued_ns=e.t_ns,
            group_id=group_id(state, e.group),
        )
        for e in oldest
    )


def _stack(state: RankState) -> tuple[str, ...]:
    """The agent says that it stands nowhere once it moves."""
    told = state.meta.get("stack", ())
    return tuple(str(line)[:_LONGEST_FRAME] for line in told) if isinstance(told, list) else ()


def group_id(state: RankState, group: int) -> str:
    """A name that all members have for a group: its label, its own name, and its ranks."""
    facts = state.groups.get(group, {})
    ranks = ",".join(str(r) for r in facts.get("ranks", ()))
    return f"{facts.get('label', '?')}/{facts.get('name', '')}/{ranks}"[:200]


def _group_rows(state: RankState) -> tuple[GroupProgress, ...]:
    return tuple(_group_row(state, group) for group in sorted(state.groups))


def _group_row(state: RankState, group: int) -> GroupProgress:
    sequence, op, nbytes = state.last_issued.get(group, _NONE_ISSUED)
    counted = state.sequences.get(group, (-1, 0))[0]
    if counted > sequence:  # in steps with idle hooks only the group's own count is known
        sequence, op, nbytes = counted, Op.NONE, 0
    return GroupProgress(
        group_id=group_id(state, group),
        label=group_label(state, group),
        ranks=tuple(int(r) for r in state.groups[group].get("ranks", ())),
        sequence=sequence,
        op=op.label,
        nbytes=nbytes,
    )


def _unit_rows(state: RankState) -> tuple[UnitRow, ...]:
    ordered = sorted(state.unit_totals.items(), key=lambda item: -item[1].exposed_ns)
    return tuple(
        UnitRow(
            fqn=state.units.get(number, f"unit {number}"),
            unshards=totals.unshards,
            reshards=totals.reshards,
            exposed_seconds=totals.exposed_ns / 1e9,
            peak_allocated_bytes=totals.peak_allocated_bytes,
            late_bytes=totals.late_bytes,
            ahead_bytes=totals.ahead_bytes,
        )
        for number, totals in ordered[:256]
        if number
    )


def _device_memory(state: RankState) -> DeviceMemory | None:
    now, device = state.memory, state.memory_peak
    if now is None:
        return None
    return DeviceMemory(
        allocated_bytes=now.allocated_bytes,
        active_bytes=now.active_bytes,
        reserved_bytes=now.reserved_bytes,
        inactive_split_bytes=now.inactive_split_bytes,
        capacity_bytes=device.capacity_bytes if device else -1,
        free_bytes=device.free_bytes if device else -1,
        retries=device.retries if device else 0,
        ooms=device.ooms if device else 0,
    )
