"""How far a figure of a run is from what the same run would give again. Pure.

No chance is involved: the same steps give the same answer. Step times are not independent, for a busy
neighbour, a checkpoint or a slow file system lasts for many steps. So the steps go into eight blocks,
in order; the spread of the blocks' figures gives the standard error, widened by what neighbouring
blocks have in common, with Student's t for so few blocks (batch means; Schmeiser 1982). What is beyond
99 % is a difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item")

BLOCKS = 8
LEAST = 5 * BLOCKS
"""With fewer steps nothing is said of the noise."""

_MOST_COMMON = 0.8
_T99 = {
    1: 63.66, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355, 9: 3.250,
    10: 3.169, 12: 3.055, 14: 2.977, 17: 2.898, 20: 2.845, 30: 2.750, 60: 2.660, 120: 2.617,
}  # fmt: skip
"""Student's t, two-sided 99 %, by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure; *error*: its standard error, None where it cannot be said."""

    value: float
    error: float | None = 0.0
    freedom: float = math.inf
    """Degrees of freedom behind *error*."""

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit."""
        error = None if self.error is None else self.error * abs(factor)
        return Estimate(self.value * factor, error, self.freedom)

    def inverted(self) -> Estimate:
        """1 / value."""
        error = None if self.error is None else self.error / self.value**2
        return Estimate(1 / self.value, error, self.freedom)


def estimate(items: Sequence[Item], figure: Callable[[Sequence[Item]], float]) -> Estimate:
    """*figure* of all *items*, which are in order; its error from its spread over blocks of them."""
    value, count = figure(items), len(items)
    if count < LEAST:
        return Estimate(value, None, 0)
    blocks = [figure(items[i * count // BLOCKS : (i + 1) * count // BLOCKS]) for i in range(BLOCKS)]
    spread = statistics.variance(blocks)
    if spread == 0:
        return Estimate(value)
    common = _in_common(blocks, spread)
    error = math.sqrt(spread / BLOCKS * (1 + common) / (1 - common))
    freedom = max(3.0, (BLOCKS - 1) * (1 - common**2) / (1 + common**2))
    return Estimate(value, error, freedom)


def _in_common(blocks: Sequence[float], spread: float) -> float:
    """How much a block and the next are alike, 0..0.8; corrected for what few blocks hide of it."""
    middle = statistics.fmean(blocks)
    found = sum((a - middle) * (b - middle) for a, b in pairwise(blocks)) / (
        (len(blocks) - 1) * spread
    )
    return min(_MOST_COMMON, max(0.0, found + 1 / len(blocks)))


def typical(values: Sequence[float]) -> Estimate:
    """The median, which outliers do not move.

    Where steps are of two kinds, and as many of each, it jumps between them; then it is far from the
    mean of the middle half, and that distance is part of its error.
    """
    found = estimate(values, statistics.median)
    if found.error is None:
        return found
    ordered, quarter = sorted(values), len(values) // 4
    middle = statistics.fmean(ordered[quarter : len(ordered) - quarter])
    return Estimate(found.value, math.hypot(found.error, found.value - middle), found.freedom)


def pooled(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over repeats of one run; its error is no less than what the repeats differ by."""
    count = len(estimates)
    if count == 1:
        return estimates[0]
    value = statistics.fmean(e.value for e in estimates)
    between = statistics.stdev(e.value for e in estimates) / math.sqrt(count)
    errors = [e.error for e in estimates if e.error is not None]
    within = math.sqrt(sum(e * e for e in errors)) / count if len(errors) == count else math.inf
    if within < between or math.isinf(within):
        return Estimate(value, between, count - 1)
    return Estimate(value, within, min(e.freedom for e in estimates))


def half_width(*estimates: Estimate) -> float | None:
    """What the sum or difference of *estimates* is uncertain by, 99 %; None where one does not say."""
    known = [(e.error, e.freedom) for e in estimates if e.error is not None]
    if len(known) < len(estimates):
        return None
    error = math.sqrt(sum(e * e for e, _ in known))
    if error == 0:
        return 0.0
    parts = sum(e**4 / f for e, f in known if e)
    freedom = error**4 / parts if parts else math.inf  # Welch and Satterthwaite
    quantiles = [t for least, t in _T99.items() if least <= freedom + 1e-9]
    return (quantiles[-1] if quantiles else _T99[1]) * error
