"""Communication by operation, group, phase and unit: means per step over the last steps. Pure.

Every sum of a row decays by :data:`DECAY` per timed step, so that a mean covers about the last ten
steps; a step in progress is left out. Waits and transfers arrive later than the other sums: the
collector adds them after it has matched a collective across ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zeromon.ring.events import Op, Phase
from zeromon.snapshot import CollectiveStatsRow, SizeRow
from zeromon.snapshot.communication import SIZE_BOUNDS
from zeromon.stats.bandwidth import algbw, bus_factor
from zeromon.stats.intervals import Interval

DECAY = 0.9
MOST_ROWS = 400
_FADES = 64
_FADED = tuple(DECAY**ago for ago in range(_FADES))

Key = tuple[Op, int, Phase, int]
"""Operation, group, phase, unit."""

CALLS, NBYTES, TIMED_BYTES, BUSY, EXPOSED, WAIT, TRANSFER, MATCHED_BYTES = range(8)
"""Indices of a row's sums: calls, bytes and nanoseconds."""
_FIELDS = 8


class CollectiveStats:
    """The sums of one row: *now* holds those of step number *step*, *past* those of all steps before."""

    __slots__ = (
        "best_busbw", "bucket", "bucket_of", "bus_factor", "calls", "exposed_ns", "matched_ns",
        "nbytes", "now", "past", "size", "sizes", "step", "totals", "waits",
    )  # fmt: skip

    def __init__(self, op: Op, size: int, step: int, totals: Any = None) -> None:
        self.sized(op, size)
        self.step = step
        self.totals = totals
        """The totals of the same operation and group: they save the fold a second look-up."""
        self.sizes = [0] * (len(SIZE_BOUNDS) + 1)
        self.nbytes = 0
        self.bucket_of = -1
        self.bucket = 0
        """The size bucket of *bucket_of* bytes, the size of the last call."""
        self.past = [0.0] * _FIELDS
        self.now = [0.0] * _FIELDS
        self.calls = 0
        self.exposed_ns = 0
        self.waits: dict[int, int] = {}
        """Rank -> nanoseconds that were exposed because that rank arrived last."""
        self.matched_ns = 0
        """Exposed nanoseconds of the calls that were matched across ranks."""
        self.best_busbw = 0.0

    def sized(self, op: Op, size: int) -> None:
        """Sets the number of ranks of the group."""
        self.size, self.bus_factor = size, bus_factor(op, size)

    def at(self, step: int) -> list[float]:
        """Returns the sums of *step*, which the caller adds to."""
        if step > self.step:
            self.past, self.now, self.step = self.before(step), [0.0] * _FIELDS, step
            bandwidth = self.busbw(self.past)
            if bandwidth is not None and bandwidth > self.best_busbw:
                self.best_busbw = bandwidth
        return self.now

    def forget(self) -> None:
        """Drops the sums of what came before the first step."""
        self.past, self.now = [0.0] * _FIELDS, [0.0] * _FIELDS

    def matched(self, step: int, wait: int, transfer: int, nbytes: int) -> None:
        """Adds the wait and the transfer (ns) of a collective of *step*, which may have ended."""
        ago = self.step - step
        if ago <= 0:
            sums, share = self.at(step), 1.0
        else:
            sums, share = self.past, _FADED[ago] if ago < _FADES else DECAY**ago
        sums[WAIT] += share * wait
        sums[TRANSFER] += share * transfer
        sums[MATCHED_BYTES] += share * nbytes

    def waited_for(self, last: int, exposed_ns: int) -> None:
        """Adds the exposed time of a matched call until rank *last* arrived; at most 0: none."""
        if last >= 0 and exposed_ns > 0:
            self.waits[last] = self.waits.get(last, 0) + exposed_ns

    def before(self, step: int) -> list[float]:
        """The decayed sums of all steps before *step*; the newest of them counts :data:`DECAY`."""
        if step <= self.step:
            return self.past
        faded = DECAY if step == self.step + 1 else DECAY ** (step - self.step)
        a, b, c, d, e, f, g, h = self.past
        i, j, k, m, n, o, p, q = self.now  # unrolled: this runs for nearly every row and step
        return [
            (a + i) * faded, (b + j) * faded, (c + k) * faded, (d + m) * faded,
            (e + n) * faded, (f + o) * faded, (g + p) * faded, (h + q) * faded,
        ]  # fmt: skip

    def busbw(self, sums: list[float]) -> float | None:
        """Bus bandwidth over *sums*, bytes/s; None without bytes."""
        nbytes, busy = moved(sums)
        if not nbytes or self.bus_factor is None or busy <= 0:
            return None
        return nbytes / (busy / 1e9) * self.bus_factor


def moved(sums: list[float]) -> tuple[float, float]:
    """Bytes, and the nanoseconds they took: of the matched transfers if any, else of all timed calls."""
    if sums[TRANSFER] > 0:
        return sums[MATCHED_BYTES], sums[TRANSFER]
    return sums[TIMED_BYTES], sums[BUSY]


def weight(steps: int) -> float:
    """The sum of the decay weights of *steps* steps."""
    return DECAY * (1 - DECAY**steps) / (1 - DECAY)


def rows(
    traffic: Mapping[Key, CollectiveStats],
    steps: int,
    group_names: Mapping[int, tuple[str, int, str]],
    unit_names: Mapping[int, str],
) -> tuple[CollectiveStatsRow, ...]:
    """Returns the rows, the most exposed first; () before the first of *steps* timed steps has ended.

    *group_names*: id -> (label, nodes it spreads over, 0 where unknown, name of its dimension).
    """
    if not steps:
        return ()
    kept = [
        _row(key, item, steps, group_names.get(key[1], ("unknown", 0, "")), unit_names)
        for key, item in traffic.items()
    ]
    kept = [row for row in kept if row.calls >= _LEAST_CALLS or row.exposed_seconds > 1e-6]
    return tuple(sorted(kept, key=lambda row: -row.exposed_seconds)[:MOST_ROWS])


_LEAST_CALLS = 0.01


def _row(
    key: Key,
    item: CollectiveStats,
    steps: int,
    group: tuple[str, int, str],
    unit_names: Mapping[int, str],
) -> CollectiveStatsRow:
    op, _, phase, unit = key
    sums, total = item.before(steps), weight(steps)
    bandwidth = item.busbw(sums)
    matched = sums[TRANSFER] > 0
    nbytes, busy = moved(sums)
    return CollectiveStatsRow(
        op=op.label,
        group=group[0],
        group_size=item.size,
        nodes=group[1],
        phase=phase.label,
        unit=unit_names.get(unit, f"unit {unit}") if unit else "",
        count=item.calls,
        calls=sums[CALLS] / total,
        nbytes=sums[NBYTES] / total,
        seconds=sums[BUSY] / total / 1e9,
        exposed_seconds=sums[EXPOSED] / total / 1e9,
        exposed_total_seconds=item.exposed_ns / 1e9,
        wait_seconds=sums[WAIT] / total / 1e9 if matched else None,
        transfer_seconds=sums[TRANSFER] / total / 1e9 if matched else None,
        algbw_bytes_per_second=algbw(nbytes, busy / 1e9) if nbytes else None,
        busbw_bytes_per_second=bandwidth,
        best_busbw_bytes_per_second=max(item.best_busbw, bandwidth or 0.0),
        dim=group[2],
    )


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


# ---- sizes ----------------------------------------------------------------------------------------


def size_bucket(nbytes: int) -> int:
    """The index of the first bound that *nbytes* does not exceed."""
    return min(len(SIZE_BOUNDS), max(0, ((nbytes - 1).bit_length() - 9) // 2))


def size_rows(
    counted: Mapping[Op, list[int]], traffic: Mapping[Key, CollectiveStats]
) -> tuple[SizeRow, ...]:
    """Returns the calls by payload size, one row per operation, without barriers.

    *counted*: operation -> calls by bucket, then bytes, of the calls that were counted but not timed.
    """
    totals = {op: list(counts) for op, counts in counted.items()}
    for (op, *_), item in traffic.items():
        counts = totals.setdefault(op, [0] * (len(SIZE_BOUNDS) + 2))
        for index, calls in enumerate(item.sizes):
            counts[index] += calls
        counts[-1] += item.nbytes
    return tuple(
        SizeRow(op=op.label, calls=tuple(counts[:-1]), nbytes=counts[-1])
        for op, counts in sorted(totals.items())
        if op is not Op.BARRIER and any(counts[:-1])
    )


# ---- all rows together ------------------------------------------------------------------------------

TINY_BYTES = 64 << 10


def tiny(rows: Iterable[CollectiveStatsRow]) -> tuple[float, float, float, float]:
    """Shares of calls, bytes and time of calls up to :data:`TINY_BYTES`, and such calls per step."""
    moving = [row for row in rows if row.op != "barrier" and row.calls > 0]
    small = [row for row in moving if row.nbytes / row.calls <= TINY_BYTES]
    calls, nbytes, seconds = (
        sum(row.calls for row in moving),
        sum(row.nbytes for row in moving),
        sum(row.seconds for row in moving),
    )
    few = sum(row.calls for row in small)
    return (
        few / calls if calls else 0.0,
        sum(row.nbytes for row in small) / nbytes if nbytes else 0.0,
        sum(row.seconds for row in small) / seconds if seconds else 0.0,
        few,
    )
