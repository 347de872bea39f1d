"""Folds collectives: counts, bytes, times, exposed communication, and what is in flight."""

from __future__ import annotations

from zeromon.fold.communication import BUSY, CALLS, EXPOSED, NBYTES, TIMED_BYTES, size_bucket
from zeromon.fold.registry import folds
from zeromon.fold.state import MOST_IN_FLIGHT, NONE_ISSUED, Arrival, RankState, stats_row
from zeromon.ring.events import (
    Counted,
    Done,
    Dtype,
    Flag,
    GroupSequence,
    Issued,
    Op,
    Stall,
    Untimed,
)
from zeromon.snapshot.communication import SIZE_BOUNDS

_INFERRED = int(Flag.INFERRED)  # an IntFlag's own `&` takes a microsecond
_FAILED = int(Flag.FAILED)
_AHEAD = int(Flag.AHEAD)
_DEVICE = int(Flag.DEVICE)
_QUANTIZED = frozenset((Dtype.INT8, Dtype.FLOAT8_E4M3FN, Dtype.FLOAT8_E5M2))
_QUANTIZED_OPS = frozenset((Op.ALL_GATHER, Op.ALL_TO_ALL, Op.REDUCE_SCATTER))


@folds(Issued)
def _fold_issued(state: RankState, e: Issued) -> None:
    if e.flags & _INFERRED:  # counted elsewhere; kept to show a hang
        state.in_flight[e.group, e.sequence] = e
        return
    row = state.traffic.get((e.op, e.group, e.phase, e.unit))
    if row is None:
        row = stats_row(state, e.op, e.group, e.phase, e.unit)
    totals = row.totals
    totals.count += 1
    totals.nbytes += e.nbytes
    if e.dtype in _QUANTIZED and e.op in _QUANTIZED_OPS:
        totals.quantized_bytes += e.nbytes
    if e.sequence > state.last_issued.get(e.group, NONE_ISSUED)[0]:
        state.last_issued[e.group] = (e.sequence, e.op, e.nbytes)
    row.called(e.nbytes)
    if e.unit and e.unit == state.background_unit:
        if len(state.background) < MOST_IN_FLIGHT:
            state.background[e.group, e.sequence] = e
        return
    if e.engine:
        engine = state.engines[e.engine]
        engine.collectives += 1
        engine.nbytes += e.nbytes
    state.window.collectives += 1
    state.window.nbytes += e.nbytes
    now = row.now if row.step == state.timed_steps else row.at(state.timed_steps)
    now[CALLS] += 1
    now[NBYTES] += e.nbytes
    state.phase = e.phase
    state.unit = e.unit
    if len(state.in_flight) < MOST_IN_FLIGHT:
        state.in_flight[e.group, e.sequence] = e


@folds(Done)
def _fold_done(state: RankState, e: Done) -> None:
    issued = state.in_flight.pop((e.group, e.sequence), None)
    if e.sequence > state.last_done.get(e.group, 0):
        state.last_done[e.group] = e.sequence
    if e.flags & _FAILED:
        return
    row = state.traffic.get((e.op, e.group, e.phase, e.unit))
    if row is None:
        row = stats_row(state, e.op, e.group, e.phase, e.unit)
    totals = row.totals
    duration = e.t_ns - e.issued_ns if e.t_ns > e.issued_ns else 0
    totals.timed += 1
    totals.duration_ns += duration
    totals.recent_bytes += e.nbytes
    totals.recent_ns += duration
    if e.unit and e.unit == state.background_unit:  # its thread has waited, and no step
        state.background.pop((e.group, e.sequence), None)
        return
    state.window.timed += 1
    totals.exposed_ns += e.blocked_ns
    row.exposed_ns += e.blocked_ns
    now = row.now if row.step == state.timed_steps else row.at(state.timed_steps)
    now[TIMED_BYTES] += e.nbytes
    now[BUSY] += duration
    now[EXPOSED] += e.blocked_ns
    if e.sequence > 0:  # groups do not number sends and receives
        step = state.step + 1 if e.issued_ns >= state.step_end_ns else state.step
        state.arrivals.append(
            Arrival(
                e.group,
                e.sequence,
                e.issued_ns,
                duration,
                step,
                state.timed_steps,
                e.nbytes,
                row,
                e.blocked_ns,
            )
        )
    else:
        state.pipeline.waited_ns += e.blocked_ns
    window = state.window
    window.communication.append((e.issued_ns, e.t_ns))
    if e.blocked_ns:
        if e.flags & _DEVICE:  # one stream's waits are disjoint; the host's times of issue are not
            window.stall_ns += e.blocked_ns
        else:
            window.blocked.append((e.t_ns - e.blocked_ns, e.t_ns))
        window.phase_exposed_ns[e.phase] += e.blocked_ns
    state.exposed_ns += e.blocked_ns
    if issued is not None and issued.engine:
        state.engines[issued.engine].exposed_ns += e.blocked_ns
    if e.unit:
        state.unit_totals[e.unit].exposed_ns += e.blocked_ns
        if e.op is Op.ALL_GATHER and state.gathers:
            ahead = bool(e.flags & _AHEAD)
            state.gathers.setdefault(ahead, [0, 0])[1] += e.blocked_ns
            if not ahead:
                window.late_ns += e.blocked_ns


@folds(Counted)
def _fold_counted(state: RankState, e: Counted) -> None:
    state.untimed[e.group] = state.untimed.get(e.group, 0) + e.calls
    state.window.collectives += e.calls
    if e.why == Untimed.IN_CPP:
        state.in_cpp += e.calls
    if e.op is Op.NONE:
        state.unattributed[e.group] = state.unattributed.get(e.group, 0) + e.calls
        return
    totals = state.ops[e.op, e.group]
    totals.count += e.calls
    totals.nbytes += e.nbytes
    if e.calls > 0 and e.why != Untimed.CONTROL_STEP:  # of a control step only the sum is known
        _count_sizes(state, e.op, e.calls, e.nbytes)
    if e.dtype in _QUANTIZED and e.op in _QUANTIZED_OPS:
        totals.quantized_bytes += e.nbytes
    if e.engine:
        engine = state.engines[e.engine]
        engine.collectives += e.calls
        engine.nbytes += e.nbytes
    state.window.nbytes += e.nbytes


def _count_sizes(state: RankState, op: Op, calls: int, nbytes: int) -> None:
    """Counts untimed calls by their size, which is the mean where several came together."""
    counts = state.sizes.get(op)
    if counts is None:
        counts = state.sizes[op] = [0] * (len(SIZE_BOUNDS) + 2)
    counts[size_bucket(nbytes // calls)] += calls
    counts[-1] += nbytes


@folds(Stall)
def _fold_stall(state: RankState, e: Stall) -> None:
    state.window.stall_ns += e.blocked_ns
    state.window.phase_exposed_ns[e.phase] += e.blocked_ns
    state.exposed_ns += e.blocked_ns
    if e.unit:
        state.unit_totals[e.unit].exposed_ns += e.blocked_ns
    group = e.group or state.unit_groups.get((e.op, e.unit))
    if group is None:
        return
    state.ops[e.op, group].exposed_ns += e.blocked_ns
    row = stats_row(state, e.op, group, e.phase, e.unit)
    row.exposed_ns += e.blocked_ns
    row.at(state.timed_steps)[EXPOSED] += e.blocked_ns


@folds(GroupSequence)
def _fold_group_sequence(state: RankState, e: GroupSequence) -> None:
    state.sequences[e.group] = (e.sequence, e.seen)


def forget_ended(state: RankState, step_start_ns: int) -> None:
    """Drops collectives that cannot be in flight any more.

    A collective that nobody waited for sends no DONE. It has ended when its step is over and a later
    collective of its group has ended, because a group runs in order. One inferred in a control step
    ended with that step.
    """
    state.in_flight, state.background = (
        {
            key: e
            for key, e in flying.items()
            if not e.flags & _INFERRED
            and (e.t_ns >= step_start_ns or e.sequence > state.last_done.get(e.group, 0))
        }
        for flying in (state.in_flight, state.background)
    )
