"""A figure over steps, for all ranks: the lowest, the median and the highest value of each step.

Values of earlier steps are kept, so that a snapshot of a thousand ranks costs only its newest steps.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from zeromon.readout.charts import Read
from zeromon.snapshot import RankSnapshot, StepSummary

_MOST_KEPT = 4096
_UNSETTLED = 2  # ranks may differ in their newest steps, which are read again
_READS = 24_000


class MinMedianMax(NamedTuple):
    """The values of one step over all ranks."""

    step: int
    least: float
    median: float
    most: float
    total: float | None
    """The sum; None where a rank has not ended the step."""


class Trend:
    """The bands of one figure of one run."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._kept: dict[int, MinMedianMax | None] = {}
        self._settled = 0

    def bands(
        self, ranks: Sequence[RankSnapshot], first: int, reads: int = _READS
    ) -> list[MinMedianMax]:
        """The bands from step *first* on. Reads at most *reads* values, those of the newest steps first.

        The older steps follow with the next snapshots.
        """
        newest = max((rank.recent[-1].step for rank in ranks if rank.recent), default=0)
        for step in range(newest, max(0, first) - 1, -1):
            if step not in self._kept or step > self._settled:
                if reads <= 0:
                    break
                self._kept[step] = self._band(ranks, step)
                reads -= len(ranks)
        self._settled = max(self._settled, newest - _UNSETTLED)
        while len(self._kept) > _MOST_KEPT:
            del self._kept[min(self._kept)]
        shown = (self._kept.get(step) for step in range(max(0, first), newest + 1))
        return [band for band in shown if band is not None]

    def _band(self, ranks: Sequence[RankSnapshot], step: int) -> MinMedianMax | None:
        values = []
        for rank in ranks:
            summary = step_of(rank.recent, step)
            value = None if summary is None else self._read(summary)
            if value is not None:
                values.append(value)
        if not values:
            return None
        values.sort()
        total = sum(values) if len(values) == len(ranks) else None
        return MinMedianMax(step, values[0], values[len(values) // 2], values[-1], total)


def step_of(recent: Sequence[StepSummary], step: int) -> StepSummary | None:
    """The summary of *step* in *recent*; None where it is absent."""
    if not recent:
        return None
    at = len(recent) - 1 - (recent[-1].step - step)
    if not (0 <= at < len(recent) and recent[at].step == step):
        at = bisect_left(recent, step, key=lambda summary: summary.step)
    return recent[at] if at < len(recent) and recent[at].step == step else None


def points(steps: Sequence[StepSummary], read: Read, first: int) -> list[tuple[float, float]]:
    """(step, value) of *steps*, from step *first* on."""
    return [(s.step, value) for s in steps if s.step >= first and (value := read(s)) is not None]
