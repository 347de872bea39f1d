"""Folds the gradient buckets of DDP, which its reducer issues from C++."""

from __future__ import annotations

from dataclasses import replace

from zeromon.fold.communication import BUSY, CALLS, EXPOSED, NBYTES, TIMED_BYTES, serial_spans
from zeromon.fold.registry import folds
from zeromon.fold.state import MOST_IN_FLIGHT, Arrival, RankState, stats_row
from zeromon.ring.events import BackwardComm, Bucket, Op, Phase


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
    last = state.history[-1] if state.history else None
    belongs_to_last = last is not None and e.start_ns < last.end_ns
    window = state.last_window if belongs_to_last else state.window
    window.communication.append((e.start_ns, e.t_ns))
    window.blocked.append((max(e.compute_end_ns, e.start_ns), e.t_ns))
    window.phase_exposed_ns[Phase.BACKWARD] += exposed
    window.timed += e.buckets
    if last is not None and belongs_to_last:
        communication_ns, exposed_ns = window.communicated_ns()
        state.history[-1] = replace(
            last,
            communication_ns=communication_ns,
            exposed_ns=exposed_ns,
            phase_exposed_ns=tuple(window.phase_exposed_ns),
            untimed=max(0, window.collectives - window.timed),
        )


def _time_buckets(state: RankState, e: BackwardComm) -> None:
    """Divides a backward's communication among its buckets; see :func:`.communication.serial_spans`."""
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
                exposed,
                e.compute_end_ns,
            )
        )
