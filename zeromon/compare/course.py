"""The memory of runs over their steps, for one chart. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from zeromon.compare.figures import RunFigures, peak_memory

MOST_POINTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One line for each column of a comparison."""

    metric: str
    """What is drawn: ``peak_reserved`` where all runs used a device, else ``peak_rss``."""
    lines: tuple[tuple[tuple[int, int], ...], ...]
    """(step, bytes of the rank that has most), of the first run of a column; () where unknown."""


def memory_course(columns: Sequence[Sequence[RunFigures]]) -> Course:
    """Returns the memory of *columns* step by step, in which no peak is lost."""
    firsts = [runs[0] for runs in columns]
    on_device = all(run.peaks["reserved"] >= 0 for run in firsts)
    lines = (run.reserved if on_device else run.resident for run in firsts)
    return Course(metric=peak_memory(on_device=on_device), lines=tuple(map(_reduced, lines)))


def _reduced(points: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The highest point of each range of steps."""
    known = [point for point in points if point[1] >= 0]
    stretch = -(-len(known) // MOST_POINTS) or 1
    ranges = (known[at : at + stretch] for at in range(0, len(known), stretch))
    return tuple(max(part, key=lambda point: point[1]) for part in ranges)
