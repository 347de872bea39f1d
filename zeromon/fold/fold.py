"""Folds the records of a ring into the state of a rank, for the live view, replay and report alike.

:func:`fold_records` changes a :class:`~zeromon.fold.state.RankState` in place, because a node folds tens
of thousands of records a second. :func:`~zeromon.fold.summarize.summarize_rank` makes a frozen snapshot
of a state. The fold reads no clock and no file.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from zeromon.fold import collectives as collectives
from zeromon.fold.ledger import end_silence
from zeromon.fold.state import (
    HANDLERS,
    MAX_ARRIVALS,
    MAX_IN_FLIGHT,
    Arrival,
    Call,
    RankState,
    ScalarTotals,
    Spent,
    folds_event,
)
from zeromon.fold.steps import record_by_host
from zeromon.ring import codes, events
from zeromon.snapshot.intervals import Interval


def fold_records(state: RankState, records: Iterable[events.Raw]) -> None:
    """Folds *records* in their order; counts as dropped those that this version does not know.

    Nine of ten are of collectives, which are folded without being decoded.
    """
    # While the unit is unknown it is 0, as is that of calls without one: no progress would count
    calls, background = state.calls, state.background_unit or -1
    for record in records:
        call = calls.get(record[2]) or _call_of_record(state, record)
        if call is None:
            continue
        t_ns = record[1]
        # The stall detector writes calls late, with the time of their issue: no time may go back
        if t_ns > state.last_event_ns:
            state.last_event_ns = t_ns
        if t_ns > state.progress_ns and call.unit != background:
            if state.silence is not None:
                end_silence(state, t_ns)
            state.progress_ns = t_ns
        if not state.first_event_ns:
            state.first_event_ns = t_ns
        collectives.fold_call_record(state, call, record)
    for arrivals in (state.arrivals, state.step_arrivals):
        if len(arrivals) > MAX_ARRIVALS:
            del arrivals[:-MAX_ARRIVALS]


def _call_of_record(state: RankState, record: events.Raw) -> Call | None:
    """Returns what a collective's records like *record* have in common; folds one of another kind."""
    if collectives.is_collective_call(record):
        call = collectives.shared_call_of(state, record[2])
        state.dropped += call is None
        return call
    event = events.decode_record(record)
    if event is None:
        state.dropped += 1
    else:
        fold_event(state, event)
    return None


def fold_event(state: RankState, event: events.Event) -> RankState:
    """Folds *event* into *state* and returns it, the same object."""
    if event.t_ns > state.last_event_ns:
        state.last_event_ns = event.t_ns
    if event.t_ns > state.progress_ns and events.is_training_progress(event, state.background_unit):
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


@folds_event(events.MemorySample)
def _fold_memory_sample(state: RankState, e: events.MemorySample) -> None:
    state.memory = e
    state.window.allocated = max(state.window.allocated, e.allocated_bytes)
    state.window.reserved = max(state.window.reserved, e.reserved_bytes)


@folds_event(events.AllocatedPeak)
def _fold_allocated_peak(state: RankState, e: events.AllocatedPeak) -> None:
    state.allocated_peaks.append(e)


@folds_event(events.MemoryPeak)
def _fold_memory_peak(state: RankState, e: events.MemoryPeak) -> None:
    state.memory_peak = e
    # Where the allocator does not count, it is -1: the failed allocations counted here must stay
    if e.ooms >= 0:
        state.new_ooms = 0
    state.reserved_at_peak = state.memory.reserved_bytes if state.memory else 0


@folds_event(events.HostSample)
def _fold_host_sample(state: RankState, e: events.HostSample) -> None:
    state.host = e
    state.window.rss = max(state.window.rss, e.rss_bytes)
    # Only forced samples read these two: -1 of the others must not erase the last figures
    if e.available_bytes >= 0:
        state.available_bytes = e.available_bytes
    if e.pinned_bytes >= 0:
        state.pinned_bytes = e.pinned_bytes


@folds_event(events.Oom)
def _fold_failed_allocation(state: RankState, e: events.Oom) -> None:
    state.oom = e
    state.new_ooms += 1


@folds_event(events.RoleBytes)
def _fold_role_bytes(state: RankState, e: events.RoleBytes) -> None:
    state.roles[e.role] = e
    if state.steps >= _WARM_UP:
        state.first_roles.setdefault(e.role, e.device_bytes + e.host_bytes)


@folds_event(events.Transfer)
def _fold_offload_transfer(state: RankState, e: events.Transfer) -> None:
    totals = state.transfers[e.path]
    totals.nbytes += e.nbytes
    totals.of_step += e.nbytes
    totals.busy_ns += e.busy_ns
    totals.blocked_ns += e.blocked_ns
    # Bytes without a time would raise the bandwidth
    if e.busy_ns:
        totals.recent_bytes += e.nbytes
        totals.recent_ns += e.busy_ns
    state.window.offload_ns += e.blocked_ns


# ---- folds what the agent reports of itself and of its rank -------------------------------------


@folds_event(events.Heartbeat)
def _fold_agent_heartbeat(state: RankState, e: events.Heartbeat) -> None:
    state.errors = e.errors
    state.phase = e.phase
    state.beats.append(Spent(e.t_ns, e.step, e.records, e.calls, e.spent_ns))


@folds_event(events.Exit)
def _fold_agent_exit(state: RankState, e: events.Exit) -> None:
    state.exit = e
    # The device reports no more borders: without this, the last steps are in no history
    while state.enqueued:
        record_by_host(state)


@folds_event(events.TraceMark)
def _fold_trace_mark(state: RankState, e: events.TraceMark) -> None:
    state.trace = e


@folds_event(events.TrialMark)
def _fold_trial_mark(state: RankState, e: events.TrialMark) -> None:
    previous = state.trial
    is_same = previous is not None and previous.number == e.number
    cost_ns = e.cost_ns + (previous.cost_ns if previous is not None and is_same else 0)
    state.trial = e._replace(cost_ns=cost_ns)


@folds_event(events.Precision)
def _fold_mixed_precision(state: RankState, e: events.Precision) -> None:
    engine = state.engines[e.engine]
    engine.precision = e
    if e.grad_norm is None:
        return
    is_finite = math.isfinite(e.grad_norm)
    engine.nonfinite += not is_finite
    # Of several engines, each has a norm of its own, and none is that of the rank
    if len(state.engines) == 1 and (is_finite or math.isnan(e.loss_scale)):
        # Else it is a scale that is tried
        _keep_scalar(state, codes.Scalar.GRAD_NORM, e.grad_norm, state.step + 1)


@folds_event(events.ScalarValue)
def _fold_scalar_value(state: RankState, e: events.ScalarValue) -> None:
    _keep_scalar(state, e.scalar, e.value, e.step)


def _keep_scalar(state: RankState, scalar: codes.Scalar, value: float, step: int) -> None:
    """Keeps a value of a step; of several in a step the last, and that one was not finite."""
    totals = state.scalars.setdefault(scalar, ScalarTotals())
    is_finite = math.isfinite(value)
    if not is_finite and totals.last_nonfinite_step != step:
        totals.nonfinite += 1
        totals.last_nonfinite_step = step
        totals.first_nonfinite_step = totals.first_nonfinite_step or step
    totals.value, totals.step = value, step
    last_step = state.history[-1] if state.history else None
    # A logger gets the loss after the optimizer's step, whose summary is in the history by then
    if last_step is not None and last_step.step == step:
        of_step: dict[str, Any] = {scalar.label: value if is_finite else None}
        state.history[-1] = replace(last_step, **of_step)
    else:
        state.window.scalars[scalar.label] = value if is_finite else None


# ---- folds the gradient buckets of DDP, which its reducer issues from C++ -----------------------


@folds_event(events.Bucket)
def _fold_gradient_bucket(state: RankState, e: events.Bucket) -> None:
    if len(state.buckets) < MAX_IN_FLIGHT:
        state.buckets.append(e)


@folds_event(events.BackwardComm)
def _fold_backward_comm(state: RankState, e: events.BackwardComm) -> None:
    """Folds DDP's own timing of one backward; it arrives in the step after the one it belongs to."""
    totals = state.ops[codes.Op.ALL_REDUCE, e.group]
    totals.duration_ns += max(0, e.t_ns - e.start_ns)
    exposed = max(0, e.t_ns - max(e.compute_end_ns, e.start_ns))
    totals.exposed_ns += exposed
    _time_gradient_buckets(state, e)
    state.exposed_ns += exposed
    steps_ago = _count_steps_ago(state, e.start_ns)
    window = state.last_windows[-steps_ago] if steps_ago else state.window
    done: events.Raw = (0, e.t_ns, 0, 0, e.start_ns, e.t_ns - max(e.compute_end_ns, e.start_ns), 0, 0)
    window.ended.append(done)
    window.blocked.append(done)
    window.phase_exposed_ns[codes.Phase.BACKWARD] += exposed
    window.timed += e.buckets
    # DDP reports in the next forward: unless the summary is replaced, its step stays untimed
    if steps_ago:
        communication_ns, exposed_ns = window.communicated_ns()
        state.history[-steps_ago] = replace(
            state.history[-steps_ago],
            communication_ns=communication_ns,
            exposed_ns=exposed_ns,
            phase_exposed_ns=tuple(window.phase_exposed_ns),
            untimed=max(0, window.collectives - window.timed),
        )


def _count_steps_ago(state: RankState, t_ns: int) -> int:
    """How many steps before the one under way *t_ns* is in, at most those whose windows are known."""
    # Not strict: the history reaches further back than the windows
    windowed = list(zip(reversed(state.history), reversed(state.last_windows), strict=False))
    return sum(t_ns < step.end_ns for step, _ in windowed)


def _time_gradient_buckets(state: RankState, e: events.BackwardComm) -> None:
    """Divides a backward's communication among its buckets; see :func:`serial_transfer_spans`."""
    # Sorted, because serial_transfer_spans() takes the order of readiness for that of transfer
    buckets, state.buckets = sorted(state.buckets, key=lambda b: b.t_ns), []
    ready_ns = [bucket.t_ns for bucket in buckets]
    spans = serial_transfer_spans(ready_ns, [bucket.nbytes for bucket in buckets], e.t_ns)
    # Not strict: no spans where the buckets have no bytes, or the end precedes the last of them
    for bucket, (start, end_ns) in zip(buckets, spans, strict=False):
        row = state.stats_row(codes.Op.ALL_REDUCE, bucket.group, codes.Phase.BACKWARD, bucket.unit)
        exposed = max(0, end_ns - max(start, e.compute_end_ns))
        row.calls += 1
        row.exposed_ns += exposed
        state.unit_totals[bucket.unit].exposed_ns += exposed
        step_sums = row.at(state.timed_steps)
        step_sums.calls += 1
        step_sums.nbytes += bucket.nbytes
        step_sums.known_bytes += bucket.nbytes
        step_sums.known_ns += end_ns - start
        step_sums.busy_ns += end_ns - start
        step_sums.exposed_ns += exposed
        step = state.step + 1 - _count_steps_ago(state, bucket.t_ns)
        ended_ns = bucket.t_ns + end_ns - start
        state.arrivals.append(
            Arrival(
                bucket.group, bucket.sequence, bucket.t_ns, ended_ns, bucket.nbytes, exposed,
                e.compute_end_ns, step, state.timed_steps, row,
            )
        )  # fmt: skip


def serial_transfer_spans(ready_ns: Sequence[int], nbytes: Sequence[int], end_ns: int) -> list[Interval]:
    """Returns when each of several transfers ran, if they ran one after another at one constant rate.

    *ready_ns*: when each transfer could begin, in the order of transfer; *nbytes*: its size; *end_ns*:
    when the last ended. The rate is the lowest that explains that end: from some transfer j on the
    queue was never empty, so rate = max over j of sum(nbytes[j:]) / (end - ready[j]). [] without
    bytes, and where the end precedes a beginning.
    """
    if not ready_ns or end_ns <= ready_ns[-1] or sum(nbytes) <= 0:
        return []
    rest_bytes, slowest = 0, 0.0
    for ready_at, size in zip(reversed(ready_ns), reversed(nbytes), strict=True):
        rest_bytes += size
        slowest = max(slowest, rest_bytes / (end_ns - ready_at))
    spans: list[Interval] = []
    free, end = float(ready_ns[0]), float(end_ns)
    for ready_at, size in zip(ready_ns, nbytes, strict=True):
        start = max(free, float(ready_at))
        free = min(end, start + size / slowest)  # not rounded: rounding errors would add up
        spans.append((round(start), round(free)))
    return spans
