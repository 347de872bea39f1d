"""Folds the gradient buckets of DDP, which its reducer issues from C++."""

from collections.abc import Sequence
from dataclasses import replace

from zeromon.fold.state import MOST_IN_FLIGHT, Arrival, RankState, folds, stats_row
from zeromon.ring.events import BackwardComm, Bucket, Op, Phase, Raw
from zeromon.stats.intervals import Interval


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
