"""The parts of a board of Grafana: panels, queries, colours, events. Pure."""

from typing import NamedTuple

from zeromon.memory.forecast import risk_of_growth
from zeromon.snapshot.levels import Level

Colours = tuple[tuple[float, str], ...]
"""From which value on a figure has which colour; the first holds for all below the second."""

NEUTRAL: Colours = ((0, "text"),)
"""Colours of a neutral figure: without a threshold, Grafana paints 80 and more red."""
LOST: Colours = ((0, "green"), (1, "red"))


def rising(level: Level) -> Colours:
    """The colours of a figure of which more is worse."""
    return ((0, "green"), (level.warning, "orange"), (level.critical, "red"))


def steps_at(risk: float) -> float:
    """So many steps before it is full, a memory that grows has this risk."""
    return next(steps for steps in range(1, 1 << 20) if risk_of_growth(steps) < risk)


class Query(NamedTuple):
    """An expression, and the legend of its series."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """A panel: its title, its kind, the unit of its figures (as Grafana names it), its queries."""

    title: str
    kind: str
    """``stat``, ``timeseries``, ``bars`` (the newest values), ``table``, ``ranks`` (a line of cells a
    rank, over time) or ``heatmap`` (how many series have which value, over time)."""
    unit: str
    queries: tuple[Query, ...]
    help: str
    width: int = 8
    height: int = 8
    stacked: bool = False
    top: float = 1.0
    """An axis of shares reaches at least so far."""
    colours: Colours = ()
    names: bool = False
    """A stat shows the names of its series in place of their values."""
    cells: tuple[tuple[str, Colours], ...] = ()
    """The colours of columns of a table."""
    links: tuple[tuple[str, str], ...] = ()
    """The board that a column of a table opens, or with "" as column a value of any other panel."""


class Row(NamedTuple):
    """Panels below a heading."""

    title: str
    panels: tuple[Panel, ...]


class Event(NamedTuple):
    """A mark in all charts of a board, from the moment it comes on."""

    name: str
    colour: str
    expr: str
    title: str


class Dashboard(NamedTuple):
    """A dashboard, and which of the variables run, node and rank it has."""

    uid: str
    title: str
    help: str
    variables: tuple[str, ...]
    rows: tuple[Row, ...]
