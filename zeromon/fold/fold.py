"""Folds the records of a ring into the state of a rank, for the live view, replay and report alike.

:func:`fold_records` changes a :class:`~zeromon.fold.state.RankState` in place, because a node folds tens
of thousands of records a second. :func:`~zeromon.fold.summarize.summarize` makes a frozen snapshot of a
state. The fold reads no clock and no file.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from zeromon.fold import collectives as collectives
from zeromon.fold.ledger import end_silence
from zeromon.fold.state import (
    HANDLERS,
    MOST_ARRIVALS,
    MOST_IN_FLIGHT,
    Arrival,
    Call,
    RankState,
    ScalarTotals,
    Spent,
    folds,
    stats_row,
)
from zeromon.fold.steps import record_by_host
from zeromon.ring.events import (
    BackwardComm,
    Bucket,
    Event,
    Exit,
    Heartbeat,
    HostSample,
    MemoryPeak,
    MemorySample,
    Oom,
    Op,
    Phase,
    Precision,
    Raw,
    RoleBytes,
    Scalar,
    ScalarValue,
    TraceMark,
    Transfer,
    TrialMark,
    decode,
    is_progress,
)
from zeromon.stats.intervals import Interval


def fold_records(state: RankState, records: Iterable[Raw]) -> None:
    """Folds *records* in their order; counts as dropped those that this version does not know.

    Nine of ten are of collectives, which are folded without being decoded.
    """
    calls, apart = state.calls, state.background_unit or -1
    for record in records:
        call = calls.get(record[2]) or _new_call(state, record)
        if call is None:
            continue
        t_ns = record[1]
        if t_ns > state.last_event_ns:
            state.last_event_ns = t_ns
        if t_ns > state.progress_ns and call.unit != apart:
            if state.silence is not None:
                end_silence(state, t_ns)
            state.progress_ns = t_ns
        if not state.first_event_ns:
            state.first_event_ns = t_ns
        collectives.fold_call(state, call, record)
    if len(state.arrivals) > MOST_ARRIVALS:
        del state.arrivals[:-MOST_ARRIVALS]


def _new_call(state: RankState, record: Raw) -> Call | None:
    """Returns what a collective's records like *record* have in common; folds one of another kind."""
    if collectives.is_call(record):
        call = collectives.call_of(state, record[2])
        state.dropped += call is None
        return call
    event = decode(record)
    if event is None:
        state.dropped += 1
    else:
        fold(state, event)
    return None


def fold(state: RankState, event: Event) -> RankState:
    """Folds *event* into *state* and returns it, the same object."""
    if event.t_ns > state.last_event_ns:
        state.last_event_ns = event.t_ns
    if event.t_ns > state.progress_ns and is_progress(event, state.background_unit):
        if state.silence is not None:
            end_silence(state, event.t_ns)
        state.progress_ns = event.t_ns
    if not state.first_event_ns:
        state.first_event_ns = event.t_ns
    HANDLERS[type(event)](state, event)
    return state


# ---- folds memory -------------------------------------------------------------------------------

_WARM_UP = 5
"""Steps before the growth of a role is measured."""


@folds(MemorySample)
def _fold_memory(state: RankState, e: MemorySample) -> None:
    state.memory = e
    state.window.allocated = max(state.window.allocated, e.allocated_bytes)
    state.window.reserved = max(state.window.reserved, e.reserved_bytes)


@folds(MemoryPeak)
def _fold_memory_peak(state: RankState, e: MemoryPeak) -> None:
    state.memory_peak = e
    if e.ooms >= 0:
        state.new_ooms = 0
    state.reserved_at_peak = state.memory.reserved_bytes if state.memory else 0


@folds(HostSample)
def _fold_host(state: RankState, e: HostSample) -> None:
    state.host = e
    state.window.rss = max(state.window.rss, e.rss_bytes)
    if e.available_bytes >= 0:
        state.available_bytes = e.available_bytes
    if e.pinned_bytes >= 0:
        state.pinned_bytes = e.pinned_bytes


@folds(Oom)
def _fold_oom(state: RankState, e: Oom) -> None:
    state.oom = e
    state.new_ooms += 1


@folds(RoleBytes)
def _fold_role(state: RankState, e: RoleBytes) -> None:
    state.roles[e.role] = e
    if state.steps >= _WARM_UP:
        state.first_roles.setdefault(e.role, e.device_bytes + e.host_bytes)


@folds(Transfer)
def _fold_transfer(state: RankState, e: Transfer) -> None:
    way = state.transfers[e.path]
    way.nbytes += e.nbytes
    way.of_step += e.nbytes
    way.busy_ns += e.busy_ns
    way.blocked_ns += e.blocked_ns
    if e.busy_ns:
        way.recent_bytes += e.nbytes
        way.recent_ns += e.busy_ns
    state.window.offload_ns += e.blocked_ns


# ---- folds what the agent reports of itself and of its rank -------------------------------------


@folds(Heartbeat)
def _fold_heartbeat(state: RankState, e: Heartbeat) -> None:
    state.errors = e.errors
    state.phase = e.phase
    state.beats.append(Spent(e.t_ns, e.step, e.records, e.calls, e.spent_ns))


@folds(Exit)
def _fold_exit(state: RankState, e: Exit) -> None:
    state.exit = e
    while state.enqueued:
        record_by_host(state)


@folds(TraceMark)
def _fold_trace(state: RankState, e: TraceMark) -> None:
    state.trace = e


@folds(TrialMark)
def _fold_trial(state: RankState, e: TrialMark) -> None:
    before = state.trial
    same = before is not None and before.number == e.number
    cost_ns = e.cost_ns + (before.cost_ns if before is not None and same else 0)
    state.trial = e._replace(cost_ns=cost_ns)


@folds(Precision)
def _fold_precision(state: RankState, e: Precision) -> None:
    engine = state.engines[e.engine]
    engine.precision = e
    if e.grad_norm is None:
        return
    is_finite = math.isfinite(e.grad_norm)
    engine.nonfinite += not is_finite
    if len(state.engines) == 1 and (is_finite or math.isnan(e.loss_scale)):
        _put(
            state, Scalar.GRAD_NORM, e.grad_norm, state.step + 1
        )  # else it is a scale that is tried


@folds(ScalarValue)
def _fold_scalar(state: RankState, e: ScalarValue) -> None:
    _put(state, e.scalar, e.value, e.step)


def _put(state: RankState, scalar: Scalar, value: float, step: int) -> None:
    """Keeps a value of a step; of several in a step the last, and that one was not finite."""
    totals = state.scalars.setdefault(scalar, ScalarTotals())
    is_finite = math.isfinite(value)
    if not is_finite and totals.last_nonfinite_step != step:
        totals.nonfinite += 1
        totals.last_nonfinite_step = step
        totals.first_nonfinite_step = totals.first_nonfinite_step or step
    totals.value, totals.step = value, step
    last = state.history[-1] if state.history else None
    if last is not None and last.step == step:
        of_step: dict[str, Any] = {scalar.label: value if is_finite else None}
        state.history[-1] = replace(last, **of_step)
    else:
        state.window.scalars[scalar.label] = value if is_finite else None


# ---- folds the gradient buckets of DDP, which its reducer issues from C++ -----------------------


@folds(Bucket)
def _fold_bucket(state: RankState, e: Bucket) -> None:
    if len(state.buckets) < MOST_IN_FLIGHT:
        state.buckets.append(e)


@folds(BackwardComm)
def _fold_backward_comm(state: RankState, e: BackwardComm) -> None:
    """Folds DDP's own timing of one backward; it arrives in the step after the one it belongs to."""
    totals = state.ops[Op.ALL_REDUCE, e.group]
    totals.duration_ns += max(0, e.t_ns - e.start_ns)
    exposed = max(0, e.t_ns - max(e.compute_end_ns, e.start_ns))
    totals.exposed_ns += exposed
    _time_buckets(state, e)
    state.exposed_ns += exposed
    ago = _steps_ago(state, e.start_ns)
    window = state.last_windows[-ago] if ago else state.window
    done: Raw = (0, e.t_ns, 0, 0, e.start_ns, e.t_ns - max(e.compute_end_ns, e.start_ns), 0, 0)
    window.ended.append(done)
    window.blocked.append(done)
    window.phase_exposed_ns[Phase.BACKWARD] += exposed
    window.timed += e.buckets
    if ago:
        communication_ns, exposed_ns = window.communicated_ns()
        state.history[-ago] = replace(
            state.history[-ago],
            communication_ns=communication_ns,
            exposed_ns=exposed_ns,
            phase_exposed_ns=tuple(window.phase_exposed_ns),
            untimed=max(0, window.collectives - window.timed),
        )


def _steps_ago(state: RankState, t_ns: int) -> int:
    """How many steps before the one under way *t_ns* is in, at most those whose windows are known."""
    known = list(zip(reversed(state.history), reversed(state.last_windows), strict=False))
    return sum(t_ns < step.end_ns for step, _ in known)


def _time_buckets(state: RankState, e: BackwardComm) -> None:
    """Divides a backward's communication among its buckets; see :func:`serial_spans`."""
    buckets, state.buckets = sorted(state.buckets, key=lambda b: b.t_ns), []
    ready = [bucket.t_ns for bucket in buckets]
    spans = serial_spans(ready, [bucket.nbytes for bucket in buckets], e.t_ns)
    for bucket, (start, end) in zip(buckets, spans, strict=False):
        row = stats_row(state, Op.ALL_REDUCE, bucket.group, Phase.BACKWARD, bucket.unit)
        exposed = max(0, end - max(start, e.compute_end_ns))
        row.calls += 1
        row.exposed_ns += exposed
        state.unit_totals[bucket.unit].exposed_ns += exposed
        now = row.at(state.timed_steps)
        now.calls += 1
        now.nbytes += bucket.nbytes
        now.timed_bytes += bucket.nbytes
        now.busy_ns += end - start
        now.exposed_ns += exposed
        step = state.step + 1 - _steps_ago(state, bucket.t_ns)
        ended = bucket.t_ns + end - start
        state.arrivals.append(
            Arrival(
                bucket.group, bucket.sequence, bucket.t_ns, ended, bucket.nbytes, exposed,
                e.compute_end_ns, step, state.timed_steps, row,
            )
        )  # fmt: skip


def serial_spans(ready_ns: Sequence[int], nbytes: Sequence[int], end_ns: int) -> list[Interval]:
    """Returns when each of several transfers ran, if they ran one after another at one constant rate.

    *ready_ns*: when each transfer could begin, in the order of transfer; *nbytes*: its size; *end_ns*:
    when the last ended. The rate is the lowest that explains that end: from some transfer j on the
    queue was never empty, so rate = max over j of sum(nbytes[j:]) / (end - ready[j]). [] without
    bytes, and where the end precedes a beginning.
    """
    if not ready_ns or end_ns <= ready_ns[-1] or sum(nbytes) <= 0:
        return []
    rest, slowest = 0, 0.0
    for ready, size in zip(reversed(ready_ns), reversed(nbytes), strict=True):
        rest += size
        slowest = max(slowest, rest / (end_ns - ready))
    spans: list[Interval] = []
    free: float = ready_ns[0]
    for ready, size in zip(ready_ns, nbytes, strict=True):
        begin = max(free, ready)
        free = min(end_ns, begin + size / slowest)  # not rounded: rounding errors would add up
        spans.append((round(begin), round(free)))
    return spans
