"""How close a memory is to running out. Pure: samples and a capacity in, a :class:`Risk` out.

Two things are looked at: the level (how much of the capacity the peaks of the last steps take) and
the growth (a straight line through the per-step figures, where it explains them).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from zeromon.snapshot import RankSnapshot, Risk

_SAFE_LEVEL = 0.80
_WARM_UP_STEPS = 10
_LEAST_SAMPLES = 20
_HORIZON_STEPS = 1000.0
_LEAST_GROWTH = 0.005


def level_risk(used_bytes: float, capacity_bytes: float) -> float:
    """0 up to 80 % of the capacity, then rising to 1 at all of it."""
    if capacity_bytes <= 0:
        return 0.0
    return _clamp((used_bytes / capacity_bytes - _SAFE_LEVEL) / (1 - _SAFE_LEVEL))


def growth_per_step(samples: Sequence[tuple[int, int]]) -> float | None:
    """Bytes a step by which *samples* (step, bytes) grow; None where a line does not explain them.

    A line explains them when it takes away most of the spread (r > 0.9) and the second half of the
    samples still grows at no less than half that slope: a plateau after warm-up is no growth.
    """
    if len(samples) < _LEAST_SAMPLES:
        return None
    steps = [s for s, _ in samples]
    values = [v for _, v in samples]
    if len(set(values)) < 2:
        return None
    if statistics.correlation(steps, values) < 0.9:
        return None
    slope = statistics.linear_regression(steps, values).slope
    half = len(samples) // 2
    late = values[half:]
    late_slope = (
        statistics.linear_regression(steps[half:], late).slope if len(set(late)) > 1 else 0.0
    )
    return slope if slope > 0 and late_slope > slope / 2 else None


def forecast(pool: str, samples: Sequence[tuple[int, int]], capacity_bytes: int) -> Risk | None:
    """The risk that *pool* runs out; None while its capacity or its use is unknown."""
    known = [(step, used) for step, used in samples if used >= 0]
    if capacity_bytes <= 0 or not known:
        return None
    peak = max(used for _, used in known[-20:])
    level = level_risk(peak, capacity_bytes)
    settled = [sample for sample in known if sample[0] > _WARM_UP_STEPS]
    slope = growth_per_step(settled)
    steps_left, growing = None, 0.0
    if slope and settled[-1][1] - settled[0][1] > _LEAST_GROWTH * capacity_bytes:
        steps_left = max(0.0, (capacity_bytes - peak) / slope)
        growing = _clamp(1 - steps_left / _HORIZON_STEPS)
    ratio = max(level, growing)
    cause = "none" if ratio == 0 else "growth" if growing >= level else "level"
    return Risk(
        pool=pool,
        ratio=ratio,
        cause=cause,
        steps_left=steps_left,
        used_bytes=peak,
        capacity_bytes=capacity_bytes,
    )


def rank_risks(rank: RankSnapshot, others_rss_bytes: int = 0) -> tuple[Risk, ...]:
    """The risks of one rank. *others_rss_bytes*: what the other ranks of the node take of the host."""
    risks = []
    if rank.memory is not None:
        reserved = [(s.step, s.reserved_bytes) for s in rank.recent]
        risks.append(forecast("device", reserved, device_capacity(rank)))
    resident = [(s.step, s.rss_bytes) for s in rank.recent]
    risks.append(forecast("host", resident, host_capacity(rank, others_rss_bytes)))
    return tuple(risk for risk in risks if risk is not None)


def device_capacity(rank: RankSnapshot) -> int:
    """What the allocator may reserve: the headroom that is left on top of what it has."""
    memory = rank.memory
    if memory is None or memory.capacity_bytes < 0:
        return -1
    return memory.reserved_bytes + max(0, memory.headroom_bytes)


def host_capacity(rank: RankSnapshot, others_rss_bytes: int) -> int:
    """What this rank may use of the host: its part of the cgroup limit, else what is available."""
    if rank.rss_bytes < 0:
        return -1
    bounds = []
    if rank.host_limit_bytes > 0:
        bounds.append(rank.host_limit_bytes - others_rss_bytes)
    if rank.host_available_bytes >= 0:
        bounds.append(rank.rss_bytes + rank.host_available_bytes)
    return max(1, min(bounds)) if bounds else -1


def _clamp(value: float) -> float:
    return min(1.0, max(0.0, value))
