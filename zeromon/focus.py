"""Which rank of a run matters most. Pure.

Every rule, view and alert that names "the worst rank" takes it from here, so that all of them name the
same one. The questions are three: which rank waits most for its communication (:func:`most_exposed`),
which is closest to running out of memory (:func:`nearest_oom`), and which failed first
(:func:`first_failed`).

Exposed communication is compared as a share of a step, not in seconds: the thresholds, the metric
``zeromon_exposed_communication_ratio``, its alert and the headline figure of every view are shares, and
PromQL can answer the question in the same way (``topk(1, ...)``). Ranks of a synchronous run have steps
of the same length, so seconds decide only between equal shares.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeromon.snapshot import RankSnapshot, Risk

SETTLED_STEPS = 10
"""A rank with fewer steps is compared only where no rank has more: first steps are exceptional."""


def most_exposed(ranks: Sequence[RankSnapshot]) -> RankSnapshot | None:
    """The rank that waits most for its communication, as a share of a step; None without any rank.

    Ranks with :data:`SETTLED_STEPS` come before all others, ranks whose communication was timed before
    those without; between equals the longer exposed time decides, then the longer step, then the lower
    rank.
    """
    return min(ranks, key=_order, default=None)


def most_exposed_of(ranks: Sequence[RankSnapshot], count: int) -> list[RankSnapshot]:
    """The *count* ranks that wait most, by the order of :func:`most_exposed`; sorted by rank."""
    if len(ranks) <= count:
        return list(ranks)
    return sorted(sorted(ranks, key=_order)[:count], key=lambda rank: rank.rank)


def _order(rank: RankSnapshot) -> tuple[bool, float, float, float, int]:
    share = -1.0 if rank.exposed_ratio is None else rank.exposed_ratio
    return (
        rank.steps < SETTLED_STEPS,
        -share,
        -(rank.exposed_seconds or 0.0),
        -(rank.step_seconds or 0.0),
        rank.rank,
    )


def nearest_oom(ranks: Sequence[RankSnapshot]) -> tuple[RankSnapshot, Risk] | None:
    """The rank with the highest out-of-memory risk, and that risk; None while no risk is known."""
    pairs = [(rank, risk) for rank in ranks for risk in rank.risks]
    return max(pairs, key=lambda pair: pair[1].ratio, default=None)


def oom_ratio(rank: RankSnapshot) -> float | None:
    """The highest out-of-memory risk of a rank over its memories; None while no risk is known."""
    return max((risk.ratio for risk in rank.risks), default=None)


def first_counted(ranks: Sequence[RankSnapshot]) -> RankSnapshot | None:
    """The first rank with a memory census, which stands for all in memory by role; None without any."""
    return next((rank for rank in ranks if rank.roles), None)


def first_failed(failed: Sequence[RankSnapshot]) -> RankSnapshot:
    """The rank that failed first, by its last event.

    Ranks that somebody or the launcher stopped come last: a launcher sends SIGTERM to all other ranks
    when one fails.
    """
    return min(failed, key=lambda rank: (bool(rank.stopped), rank.last_event_ns))
