"""Bandwidth and overlap of collectives. Pure; units are in the names."""

from collections.abc import Callable

from zeromon.ring.events import Op

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
    if communication_ns <= 0:
        return None
    return min(1.0, max(0.0, 1 - exposed_ns / communication_ns))
