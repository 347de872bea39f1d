"""The data that a page of a run is made from, and the parts that it is made into. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zeromon.comparison.comparison import Comparison
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot
from zeromon.snapshot.focus import most_exposed
from zeromon.snapshot.run import About
from zeromon.storage.step_history.rows import Series
from zeromon_dashboard.charts import Chart
from zeromon_dashboard.url_state import Route

Props = dict[str, Any]
"""Properties of a component by name."""

Parts = dict[str, Props]
"""Properties by the id of a component."""


@dataclass(frozen=True, slots=True)
class Known:
    """Everything that a page of a run is made from."""

    where: Route
    run: RunSnapshot
    series: Series
    findings: Sequence[Finding] = ()
    """All findings in the run's record."""
    span: tuple[float, float] | None = None
    """The first and the last recorded moment, seconds since the epoch."""
    live: bool = False
    age: float = 0.0
    """Seconds since the snapshot was read."""
    trouble: str = ""
    """Why there is no newer snapshot; "" where nothing is wrong."""
    others: Sequence[tuple[RunSnapshot, Series]] = ()
    """Runs that charts are laid over."""
    comparison: Comparison | None = None
    """The comparison of the run with the others; None without others."""
    about: About = field(default_factory=About)

    @property
    def chosen(self) -> RunSnapshot:
        """The run with the chosen ranks alone, which every figure of a page is of."""
        ranks = self.where.ranks
        selected = tuple(r for r in self.run.ranks if r.rank in ranks)
        return replace(self.run, ranks=selected) if selected else self.run

    @property
    def rank(self) -> RankSnapshot | None:
        """The rank that parts about one rank show: the chosen one, else the most exposed one."""
        if self.where.ranks:
            chosen = (r for r in self.run.ranks if r.rank == self.where.ranks[0])
            return next(chosen, None)
        return most_exposed(self.run.ranks)


@dataclass(frozen=True, slots=True)
class Page:
    """One page at one moment."""

    parts: Parts
    charts: dict[str, Chart] = field(default_factory=dict)
    """Charts to whose lines an open tab appends points."""
