"""What the machine, and not the program, may have added to the times of a column. Pure.

A rank that could run and had no CPU would have been faster by at most that time. And where a program is
slower, its quickest steps are slower, too: a neighbour that comes and goes leaves them as they are. A
difference is bounded by both. Three repeats of each column, taken in turns, show the same as noise.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeromon.compare.figures import Metric, RunFigures
from zeromon.units import human_ratio

REPEATS = 3
"""From so many repeats on their spread shows what the machine does."""
_QUICK = 0.5
"""A difference is doubtful where the quickest steps show less than this part of it."""
_LEAST_STEPS = 40
_NOT_OF_TIME = frozenset(("headroom",))
_WHOLE_STEPS = frozenset(("step_time",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is known of the machine during the steps of a column."""

    lacked: float | None
    """The largest share of the time of its steps that a rank had no CPU; None where unknown."""
    step: float
    """The median step, seconds; 0 without steps."""
    quick: float
    """The step that a tenth of the steps do not exceed, seconds; 0 where too few."""
    repeats: int


class Span(NamedTuple):
    """The least and the most that a difference may be without what the machine added."""

    low: float
    high: float


def machine_of(runs: Sequence[RunFigures]) -> Machine:
    """Returns what *runs*, the repeats of one column, tell of their machine."""
    seconds = [one for run in runs for one in run.seconds]
    lacks = [
        share
        for run in runs
        for rank in run.snapshot.ranks
        if rank.pressure and (share := rank.pressure.steps_cpu_wait_ratio) is not None
    ]
    enough = len(seconds) >= _LEAST_STEPS
    return Machine(
        lacked=max(lacks, default=None),
        step=statistics.median(seconds) if seconds else 0.0,
        quick=statistics.quantiles(seconds, n=10)[0] if enough else 0.0,
        repeats=len(runs),
    )


def slack(metric: Metric, machine: Machine, value: float) -> float:
    """Returns by how much a lack of CPUs may have made *value* worse; 0 for what is no time."""
    lacked = min(machine.lacked or 0.0, 0.99)
    if metric.name in _WHOLE_STEPS:
        return lacked * value
    if metric.unit == "1/s":
        return value / (1 - lacked) - value
    if metric.unit == "ratio" and metric.name not in _NOT_OF_TIME:
        return min(value, lacked)
    return min(value, lacked * machine.step) if metric.unit == "s" else 0.0


def span(metric: Metric, first: Machine, other: Machine, of_first: float, of_other: float) -> Span:
    """Returns the bounds of the difference of a metric; both are the difference itself without doubt."""
    difference = of_other - of_first
    if min(first.repeats, other.repeats) >= REPEATS:
        return Span(difference, difference)
    worse, less = slack(metric, other, of_other), slack(metric, first, of_first)
    if metric.more_is_better:
        low, high = difference - less, difference + worse
    else:
        low, high = difference - worse, difference + less
    if metric.unit == "1/s" or metric.name in _WHOLE_STEPS:
        quick = _of_quick_steps(metric, first, other, of_first)
        if quick is not None and abs(quick) < _QUICK * abs(difference):
            low, high = min(low, quick), max(high, quick)
    return Span(low, high)


def _of_quick_steps(
    metric: Metric, first: Machine, other: Machine, of_first: float
) -> float | None:
    """Returns the difference as the quickest steps show it; None where they are too few."""
    if not first.quick or not other.quick:
        return None
    times = other.quick / first.quick
    return of_first * ((1 / times if metric.unit == "1/s" else times) - 1)


def doubt(first: Machine, other: Machine) -> str:
    """Returns what makes times of two columns not comparable; "" where nothing does."""
    if min(first.repeats, other.repeats) >= REPEATS or not first.step or not first.quick:
        return ""
    lacked = max(first.lacked or 0.0, other.lacked or 0.0)
    median, quick = other.step / first.step - 1, other.quick / first.quick - 1
    if abs(quick) < _QUICK * abs(median):
        return (
            f"the medians differ by {human_ratio(median)}, the quickest tenths of the steps by "
            f"{human_ratio(quick)}"
        )
    return f"ranks had no CPU for up to {human_ratio(lacked)} of the time" if lacked else ""
