"""The map of all ranks: a cell for each, by node, with a scale around the median. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from zeromon.readout import text
from zeromon.readout.figures import Figure
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.focus import first_failed
from zeromon.snapshot.run import FleetNode


@dataclass(frozen=True, slots=True)
class Cell:
    """The value of one rank, or, of a large run, of one node."""

    subject: RankSnapshot | FleetNode
    value: float | None
    """In the figure's base unit; None where unknown."""
    is_blamed: bool = False

    @property
    def name(self) -> str:
        """``rank 3``, or the node's name."""
        return (
            f"rank {self.subject.rank}" if isinstance(self.subject, RankSnapshot) else self.subject.node
        )


@dataclass(frozen=True, slots=True)
class RankMap:
    """The cells of a figure, and their scale: equal ranks have one colour."""

    by_node: dict[str, list[Cell]]
    """Node -> the cells of its ranks; of a large run "" -> a cell for each node."""
    median: float
    distance: float
    """The distance from the median at which the scale ends."""
    blame: str
    """Which cells are marked, and why: ``rank 5 awaited in a hang``; "" where none is."""

    @property
    def cells(self) -> list[Cell]:
        """The cells of all nodes."""
        return [cell for cells in self.by_node.values() for cell in cells]

    def shade(self, value: float | None, levels: int) -> int:
        """The shade by the distance from the median, which has the middle of *levels*; -1: unknown."""
        if value is None:
            return -1
        return round((1 + (value - self.median) / self.distance) / 2 * (levels - 1))


_MAX_NAMED = 3


def map_ranks(run: RunSnapshot, mapped: Figure, ranks: Sequence[RankSnapshot]) -> RankMap:
    """The map of *ranks* of *run*; of a large run that of its nodes."""
    blamed = {number for hang in run.hangs for number in (*hang.missing, *hang.dead)}
    if not blamed and text.has_died(run):  # a run that was stopped has nobody to blame
        failed = first_failed(run.ranks, run.hangs)
        blamed = {failed.rank} if failed is not None else set()
    by_node: dict[str, list[Cell]] = {}
    if run.fleet is not None:
        by_node[""] = [Cell(node, mapped.of_node(node)) for node in run.fleet.nodes]
    else:
        for rank in sorted(ranks, key=lambda rank: rank.rank):
            cell = Cell(rank, mapped.of_rank(rank), rank.rank in blamed)
            by_node.setdefault(rank.node, []).append(cell)
    cells = [cell for row in by_node.values() for cell in row]
    names = [cell.name for cell in cells if cell.is_blamed]
    ellipsis = ", ..." * (len(names) > _MAX_NAMED)
    manner = "awaited in a hang" if run.hangs else "failed first"
    blame = f"{', '.join(names[:_MAX_NAMED])}{ellipsis} {manner}" if names else ""
    return RankMap(by_node, *scale_around_median([c.value for c in cells if c.value is not None]), blame)


def scale_around_median(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the distance from it at which the scale ends: at least a tenth of the largest."""
    if not values:
        return 0.0, 1.0
    median = statistics.median(values)
    distance = max(abs(value - median) for value in values)
    return median, max(distance, 0.1 * max(map(abs, values))) or 1.0
