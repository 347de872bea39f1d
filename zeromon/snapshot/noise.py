"""The noise of a run's figures: how far the same figure of a repeated run may differ. Pure.

The result is deterministic: no random resampling. Step times are not independent, because a busy
neighbour, a checkpoint or a slow file system lasts for many steps. So the steps are divided, in order,
into eight blocks; the spread of the blocks' figures gives the standard error, widened by the
correlation of neighbouring blocks, with Student's t for so few blocks (batch means; Schmeiser 1982). A
difference beyond the 99 % interval is significant.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item")

BLOCKS = 8
MIN_STEPS = 5 * BLOCKS
"""With fewer steps the noise is unknown."""

_MAX_CORRELATION = 0.8
_T99 = {
    1: 63.66, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355, 9: 3.250,
    10: 3.169, 12: 3.055, 14: 2.977, 17: 2.898, 20: 2.845, 30: 2.750, 60: 2.660, 120: 2.617,
}  # fmt: skip
"""Student's t, two-sided 99 %, by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its standard *error*, None where unknown."""

    value: float
    error: float | None = 0.0
    freedom: float = math.inf
    """Degrees of freedom behind *error*."""

    def scaled(self, factor: float) -> "Estimate":
        """The estimate in another unit: figure and error times *factor*."""
        error = None if self.error is None else self.error * abs(factor)
        return Estimate(self.value * factor, error, self.freedom)

    def inverted(self) -> "Estimate":
        """1 / value."""
        error = None if self.error is None else self.error / self.value**2
        return Estimate(1 / self.value, error, self.freedom)


def block_estimate(items: Sequence[Item], reduce: Callable[[Sequence[Item]], float]) -> Estimate:
    """Returns *reduce* of all *items*, in order of time; its error is from its spread over blocks."""
    value, count = reduce(items), len(items)
    if count < MIN_STEPS:
        return Estimate(value, None, 0)
    blocks = [reduce(items[i * count // BLOCKS : (i + 1) * count // BLOCKS]) for i in range(BLOCKS)]
    spread = statistics.variance(blocks)
    # Equal blocks have no correlation: it would be divided by their spread below
    if spread == 0:
        return Estimate(value)
    # The correlation of neighbouring blocks, 0..0.8, corrected for the bias of few blocks
    mean_block = statistics.fmean(blocks)
    correlation = sum((a - mean_block) * (b - mean_block) for a, b in pairwise(blocks)) / (
        (len(blocks) - 1) * spread
    )
    common = min(_MAX_CORRELATION, max(0.0, correlation + 1 / len(blocks)))
    error = math.sqrt(spread / BLOCKS * (1 + common) / (1 - common))
    freedom = max(3.0, (BLOCKS - 1) * (1 - common**2) / (1 + common**2))
    return Estimate(value, error, freedom)


def median_of(values: Sequence[float]) -> Estimate:
    """Returns the median, which is robust to outliers.

    With equally many steps of two kinds, the median jumps between the two kinds. The median is then far
    from the mean of the middle half, and that distance is part of the error.
    """
    median = block_estimate(values, statistics.median)
    if median.error is None:
        return median
    ordered, quarter = sorted(values), len(values) // 4
    center = statistics.fmean(ordered[quarter : len(ordered) - quarter])
    return Estimate(median.value, math.hypot(median.error, median.value - center), median.freedom)


def pooled_mean(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over repeats of one run; its error is at least the spread of the repeats."""
    count = len(estimates)
    if count == 1:
        return estimates[0]
    value = statistics.fmean(e.value for e in estimates)
    between_error = statistics.stdev(e.value for e in estimates) / math.sqrt(count)
    errors = [e.error for e in estimates if e.error is not None]
    own_error = math.sqrt(sum(e * e for e in errors)) / count if len(errors) == count else math.inf
    if own_error < between_error or math.isinf(own_error):
        return Estimate(value, between_error, count - 1)
    return Estimate(value, own_error, min(e.freedom for e in estimates))


def half_width(*estimates: Estimate) -> float | None:
    """The 99 % uncertainty of the sum or difference of *estimates*; None where one error is unknown."""
    error_terms = [(e.error, e.freedom) for e in estimates if e.error is not None]
    if len(error_terms) < len(estimates):
        return None
    error = math.sqrt(sum(e * e for e, _ in error_terms))
    if error == 0:
        return 0.0
    freedom_sum = sum(e**4 / f for e, f in error_terms if e)
    freedom = error**4 / freedom_sum if freedom_sum else math.inf  # Welch and Satterthwaite
    # Welch and Satterthwaite may give 6.9999999 for 7: without the slack, t is that of 6 degrees
    quantiles = [t for row_freedom, t in _T99.items() if row_freedom <= freedom + 1e-9]
    return (quantiles[-1] if quantiles else _T99[1]) * error


ROUND_BLOCKS = 4
MIN_ROUNDS = 3


def gain_in_turns(blocks: Sequence[float]) -> Estimate | None:
    """Returns by how much *on* is below *off*; None without a whole round.

    *blocks* has the figure of each block, in order: off, on, on, off, and again. A drift of the machine
    that is linear over four blocks cancels. The differences of the rounds are the sample: blocks hold
    many steps, so neighbouring steps that resemble each other do not narrow the error.
    """
    rounds = len(blocks) // ROUND_BLOCKS
    if not rounds:
        return None
    gains = []
    for index in range(0, rounds * ROUND_BLOCKS, ROUND_BLOCKS):
        first_off, first_on, second_on, second_off = blocks[index : index + ROUND_BLOCKS]
        gains.append((first_off + second_off - first_on - second_on) / 2)
    value = statistics.fmean(gains)
    if rounds < MIN_ROUNDS:
        return Estimate(value, None, 0)
    return Estimate(value, statistics.stdev(gains) / math.sqrt(rounds), rounds - 1)
