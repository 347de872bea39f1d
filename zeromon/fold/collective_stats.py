"""Communication by operation, group, phase and unit: means per step over the last steps. Pure.

Every sum of a row decays by :data:`DECAY` per timed step, so that a mean covers about the last ten
steps; a step in progress is left out. Waits and transfers arrive later than the other sums: the
collector adds them after it has matched a collective across ranks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from zeromon.ring.codes import Op, Phase
from zeromon.snapshot import CollectiveStatsRow
from zeromon.snapshot.communication import SIZE_BOUNDS, SizeRow, algbw, bus_factor, busbw

DECAY: Final = 0.9
FAINT_NS = 1e-6
"""Shortest faded duration to divide by: less remains some hundred steps after the last call.

After thousands of steps it would be a denormal number, whose quotients are wrong or none."""
MAX_ROWS = 400
_FADES: Final = 64
_FADED: Final = tuple(DECAY**steps for steps in range(_FADES))

MIN_KNOWN: Final = 0.05
"""The least share of the bytes with a known time that a bandwidth is given from: the rest may be old."""

Key = tuple[Op, int, Phase, int]
"""Operation, group, phase, unit."""


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
    recent_unknown_bytes: float = 0.0
    """Bytes of calls whose span is only a bound; it decays as :attr:`recent_bytes`."""
    best_busbw: float = 0.0

    def recent_bus_bandwidth(self, op: Op, size: int) -> float | None:
        """Bus bandwidth over the last steps, bytes/s; None where none is known any more.

        That is long after the last call, where nearly all calls have no known span, and for the totals
        of a damaged record.
        """
        all_bytes = self.recent_bytes + self.recent_unknown_bytes
        if not math.isfinite(all_bytes) or self.recent_ns < FAINT_NS:
            return None
        if self.recent_bytes < MIN_KNOWN * all_bytes:
            return None
        return busbw(op, self.recent_bytes, self.recent_ns / 1e9, size)


class Sums:
    """Calls, bytes and nanoseconds of one row over some steps."""

    __slots__ = (
        "busy_ns", "calls", "exposed_ns", "known_bytes", "known_ns", "matched_bytes", "matched_ns",
        "matches", "nbytes", "transfer_ns", "wait_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.calls = self.nbytes = self.busy_ns = 0.0
        self.known_bytes = self.known_ns = 0.0
        self.exposed_ns = self.wait_ns = self.transfer_ns = 0.0
        self.matched_bytes = self.matched_ns = 0.0
        self.matches = 0.0

    def absorb_step(self, step_sums: "Sums", share: float) -> None:
        """Adds the sums of the newest step, and keeps *share* of all."""
        self.calls = (self.calls + step_sums.calls) * share  # no loop: most rows do this each step
        self.nbytes = (self.nbytes + step_sums.nbytes) * share
        self.known_bytes = (self.known_bytes + step_sums.known_bytes) * share
        self.known_ns = (self.known_ns + step_sums.known_ns) * share
        self.busy_ns = (self.busy_ns + step_sums.busy_ns) * share
        self.exposed_ns = (self.exposed_ns + step_sums.exposed_ns) * share
        self.wait_ns = (self.wait_ns + step_sums.wait_ns) * share
        self.transfer_ns = (self.transfer_ns + step_sums.transfer_ns) * share
        self.matched_bytes = (self.matched_bytes + step_sums.matched_bytes) * share
        self.matched_ns = (self.matched_ns + step_sums.matched_ns) * share
        self.matches = (self.matches + step_sums.matches) * share

    def per_step(self, steps: float) -> "Sums":
        """Returns the means over so many *steps*."""
        mean_sums = Sums()
        mean_sums.absorb_step(self, 1 / steps)
        return mean_sums

    def moved(self) -> tuple[float, float]:
        """Bytes, and the nanoseconds they took: of known transfers, else of this rank's known spans.

        A span includes the wait for the other ranks, so it stands in only where none is matched. Zeros
        where nearly nothing is known.
        """
        moved = (
            (self.matched_bytes, self.matched_ns) if self.matches else (self.known_bytes, self.known_ns)
        )
        return moved if moved[0] >= MIN_KNOWN * self.nbytes else (0.0, 0.0)


class CollectiveStats:
    """The sums of one row: *now* holds those of step number *step*, *past* those of all steps before."""

    __slots__ = (
        "best_busbw", "bucket", "bucket_of", "bus_factor", "calls", "device", "exposed_ns",
        "matched_ns", "nbytes", "now", "op", "past", "size", "sizes", "step", "totals", "waits",
    )  # fmt: skip

    def __init__(self, op: Op, size: int, step: int, totals: OpTotals) -> None:
        self.op, self.size = op, size
        self.bus_factor = bus_factor(op, size) or 0.0
        """busbw / algbw; 0 where there is no such bandwidth."""
        self.step = step
        self.totals = totals
        """The totals of the same operation and group: they save the fold a second look-up."""
        self.sizes: list[int] = [0] * (len(SIZE_BOUNDS) + 1)
        self.nbytes = 0
        self.bucket_of = -1
        self.bucket = 0
        """The size bucket of *bucket_of* bytes, the size of the last call."""
        self.past = Sums()
        self.now = Sums()
        self.calls = 0
        self.exposed_ns = 0
        self.waits: dict[int, int] = {}
        """Rank -> nanoseconds that were exposed because that rank arrived last."""
        self.matched_ns = 0
        """Exposed nanoseconds of the calls that were matched across ranks."""
        self.best_busbw = 0.0
        self.device: CollectiveStats | None = None
        """The sums of what a device has ended, by its own steps: the host is ahead of them."""

    def set_group_size(self, op: Op, size: int) -> None:
        """Sets the number of ranks of the group."""
        self.size, self.bus_factor = size, bus_factor(op, size) or 0.0
        if self.device is not None:
            self.device.set_group_size(op, size)

    def at(self, step: int) -> Sums:
        """Returns the sums of *step*, which the caller adds to."""
        if step > self.step:
            self.past.absorb_step(self.now, _remaining_share(step - self.step))
            self.now, self.step = Sums(), step
            self.best_busbw = max(self.best_busbw, self.busbw(self.past))
        return self.now

    def at_device(self, step: int) -> Sums:
        """Returns the sums of what a device has ended in its *step*, which the caller adds to."""
        if self.device is None:
            self.device = CollectiveStats(self.op, self.size, step, self.totals)
        sums = self.device.at(step)
        self.best_busbw = max(self.best_busbw, self.device.best_busbw)
        return sums

    def forget(self) -> None:
        """Drops the sums of what came before the first step."""
        self.past, self.now, self.device = Sums(), Sums(), None

    def matched(
        self, step: int, wait: int, transfer: int, known_bytes: int, on_device: bool = False
    ) -> None:
        """Adds the wait and the transfer (ns) of a collective of *step*, which may have ended.

        *known_bytes*: its bytes, 0 where the transfer is only a bound.
        """
        if on_device:
            self.at_device(step)
        # A test of its own: at_device() has made the row, which a type checker cannot see
        if on_device and self.device is not None:
            self.device.matched(step, wait, transfer, known_bytes)
            return
        steps_ago = self.step - step
        if steps_ago <= 0:
            sums, share = self.at(step), 1.0
        else:
            sums, share = self.past, _remaining_share(steps_ago)
        sums.matches += share
        sums.wait_ns += share * wait
        sums.transfer_ns += share * transfer
        if known_bytes:
            sums.matched_bytes += share * known_bytes
            sums.matched_ns += share * transfer

    def waited_for(self, last_rank: int, exposed_ns: int) -> None:
        """Adds the exposed time of a matched call until *last_rank* arrived; at most 0: none."""
        if last_rank >= 0 and exposed_ns > 0:
            self.waits[last_rank] = self.waits.get(last_rank, 0) + exposed_ns

    def before(self, step: int) -> Sums:
        """The decayed sums of all steps before *step*; the newest of them counts :data:`DECAY`."""
        if step <= self.step:
            return self.past
        sums = Sums()
        sums.absorb_step(self.past, 1.0)
        sums.absorb_step(self.now, _remaining_share(step - self.step))
        return sums

    def busbw(self, sums: Sums) -> float:
        """Bus bandwidth over *sums*, bytes/s; 0 where there is none, and long after the last call."""
        nbytes, busy = sums.moved()
        return nbytes / (busy / 1e9) * self.bus_factor if busy >= FAINT_NS else 0.0


def _remaining_share(steps: int) -> float:
    """Returns the share of a sum that is left after so many steps."""
    return _FADED[steps] if steps < _FADES else math.pow(DECAY, steps)


def decay_weight(steps: int) -> float:
    """The sum of the decay weights of *steps* steps."""
    return DECAY * (1 - DECAY**steps) / (1 - DECAY)


def traffic_rows(
    traffic: Mapping[Key, CollectiveStats],
    steps: int,
    device_steps: int,
    group_names: Mapping[int, tuple[str, int, str]],
    unit_names: Mapping[int, str],
) -> tuple[CollectiveStatsRow, ...]:
    """Returns the rows, the most exposed first; () before the first of *steps* timed steps has ended.

    *device_steps*: how many of them the device has ended. *group_names*: id -> (label, nodes it spreads
    over, 0 where unknown, name of its dimension).
    """
    if not steps:
        return ()
    stats_rows = [
        _traffic_row(
            key, item, steps, device_steps, group_names.get(key[1], ("unknown", 0, "")), unit_names
        )
        for key, item in traffic.items()
    ]
    # Without this, what is called at the first step alone stays in every view while its sums fade
    stats_rows = [r for r in stats_rows if r.calls >= _MIN_CALLS or r.exposed_seconds > 1e-6]
    return tuple(sorted(stats_rows, key=lambda row: -row.exposed_seconds)[:MAX_ROWS])


_MIN_CALLS = 0.01


def _traffic_row(
    key: Key,
    item: CollectiveStats,
    steps: int,
    device_steps: int,
    group: tuple[str, int, str],
    unit_names: Mapping[int, str],
) -> CollectiveStatsRow:
    op, _, phase, unit = key
    sums = item.before(steps).per_step(decay_weight(steps))
    # One group may use gloo for the CPU and NCCL for a device: then a row has times of both
    if item.device is not None:
        # Without max(), per_step() divides by 0 until the device ends its first step
        sums.absorb_step(
            item.device.before(device_steps).per_step(decay_weight(max(1, device_steps))), 1.0
        )
    bandwidth = item.busbw(sums) or None
    nbytes, busy = sums.moved()
    return CollectiveStatsRow(
        op=op.label, group=group[0], group_size=item.size, nodes=group[1], phase=phase.label,
        unit=unit_names.get(unit, f"unit {unit}") if unit else "", count=item.calls, calls=sums.calls,
        nbytes=sums.nbytes, seconds=sums.busy_ns / 1e9, exposed_seconds=sums.exposed_ns / 1e9,
        exposed_total_seconds=item.exposed_ns / 1e9,
        wait_seconds=sums.wait_ns / 1e9 if sums.matches else None,
        transfer_seconds=sums.transfer_ns / 1e9 if sums.transfer_ns > 0 else None,
        algbw_bytes_per_second=algbw(nbytes, busy / 1e9) if nbytes else None,
        busbw_bytes_per_second=bandwidth,
        best_busbw_bytes_per_second=max(item.best_busbw, bandwidth or 0.0), dim=group[2],
    )  # fmt: skip


# ---- sizes ----------------------------------------------------------------------------------------


def size_bucket_index(nbytes: int) -> int:
    """The index of the first bound that *nbytes* does not exceed."""
    # Less one, as bounds are inclusive. Without max(), a call of 0 bytes has a negative index
    return min(len(SIZE_BOUNDS), max(0, ((nbytes - 1).bit_length() - 9) // 2))


def payload_size_rows(
    counted: Mapping[Op, list[int]], traffic: Mapping[Key, CollectiveStats]
) -> tuple[SizeRow, ...]:
    """Returns the calls by payload size, one row per operation, without barriers.

    *counted*: operation -> calls by bucket, then bytes, of the calls that were counted but not timed.
    """
    # Without the copies, each snapshot adds the timed calls to the state's own counts
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


def tiny_call_shares(rows: Iterable[CollectiveStatsRow]) -> tuple[float, float, float, float]:
    """Shares of calls, bytes and time of calls up to :data:`TINY_BYTES`, and such calls per step."""
    moving = [row for row in rows if row.op != "barrier" and row.calls > 0]
    small = [row for row in moving if row.nbytes / row.calls <= TINY_BYTES]
    calls = sum(row.calls for row in moving)
    nbytes = sum(row.nbytes for row in moving)
    seconds = sum(row.seconds for row in moving)
    small_calls = sum(row.calls for row in small)
    return (
        small_calls / calls if calls else 0.0,
        sum(row.nbytes for row in small) / nbytes if nbytes else 0.0,
        sum(row.seconds for row in small) / seconds if seconds else 0.0,
        small_calls,
    )
