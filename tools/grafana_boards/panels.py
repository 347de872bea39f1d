"""The parts of a board of Grafana: panels, queries, colours, events. Pure."""

from typing import NamedTuple

from zeromon.memory.forecast import risk_of_growth
from zeromon.snapshot.levels import Level, Severity

Colours = tuple[tuple[float, str], ...]
"""From which value on a figure has which colour; the first holds for all below the second."""

NEUTRAL: Colours = ((0, "text"),)
"""Colours of a neutral figure: without a threshold, Grafana paints 80 and more red."""
LOST: Colours = ((0, "text"), (1, "red"))

SEVERITY_COLOURS = {Severity.CRITICAL: "red", Severity.WARNING: "orange", Severity.INFO: "blue"}

BLUE, VIOLET, ORANGE, GREY, RED = "#3274D9", "#A352CC", "#FF9830", "#8E8E8E", "#E02F44"
PART_COLOURS = {
    # compute
    "compute": BLUE, "forward": "#5FA8E8", "backward": BLUE, "optimizer": "#1F4E9C",
    # communication, and what is in flight beside compute
    "exposed": VIOLET, "offload": "#7B5EA7", "cpu_optimizer": "#7B5EA7",
    # waiting
    "waiting": ORANGE, "data": "#E0B400", "data_wait": "#E0B400", "stall": "#C4620A",
    # the script's own code, and pauses that it wants
    "other": GREY, "set_up": "#B8BCC2", "shut_down": "#B8BCC2", "checkpoint": "#5B8F8A",
    "evaluation": "#3FA796", "generation": "#7FB069", "garbage_collection": "#6B5B4B",
    "compile": "#4C6A78",
    # what ends a run
    "hang": RED, "dead": "#AD0317", "lost": "#FF7383",
}  # fmt: skip
"""The colour of each phase and cause, in every panel that has it."""

NAME_COLOURS = {
    "fastest": "#5FA8E8", "slowest": ORANGE, "worst rank": ORANGE, "p90": VIOLET, "p99": ORANGE,
    "left": GREY, "reserved": VIOLET, "capacity": GREY,
}  # fmt: skip
"""The colour of a line by its legend; any other fixed legend is blue."""

LABEL_COLOURS = {
    "{{op}} {{group}}": {
        "all_reduce": "#8A6FD1", "all_to_all": "#B07AA1", "broadcast": "#C48AD8",
        "reduce_scatter": "#5B3A9E", "all_gather": VIOLET, "all_gather .* backward$": "#D3A6EA",
    },
    "{{role}} on {{place}}": {
        "(sharded_)?param": BLUE, "unsharded_param": "#5FA8E8", "master_param": "#1F4E9C",
        "(sharded_)?grad": "#7FB069", "unsharded_.*grad": "#3FA796", "optimizer_state": ORANGE,
        "buffer": GREY, "bucket": "#B07AA1",
    },
}  # fmt: skip
"""The colour of a line by how its legend begins, for the legends that begin with these labels."""

RANK_COLOURS = (
    BLUE, ORANGE, "#3FA796", VIOLET, "#E0B400", "#5FA8E8", "#B07AA1", "#7FB069", "#8C6D4F", GREY,
)  # fmt: skip
"""The colour of a rank by the last digit of its number; none is red."""


def rising(level: Level) -> Colours:
    """The colours of a figure of which more is worse, by the severities of a finding about it."""
    worst = level.severity(level.critical), level.severity(level.warning)
    critical, warning = (SEVERITY_COLOURS[severity] for severity in worst if severity is not None)
    return ((0, "green"), (level.warning, warning), (level.critical, critical))


def steps_at(risk: float) -> float:
    """So many steps before it is full, a memory that grows has this risk."""
    return next(steps for steps in range(1, 1 << 20) if risk_of_growth(steps) < risk)


ALWAYS_1 = "info"
"""The legend of a query whose labels are the answer: a table has no column of its value."""


class Query(NamedTuple):
    """An expression, and the legend of its series."""

    expr: str
    legend: str


SHORTEST_AXIS = {"s": 0.001, "bytes": 1024.0, "Bps": 1000.0}
"""An axis reaches at least so far, by its unit; any other one 1."""


class Cell(NamedTuple):
    """A column of a table: its unit, and its colours where a value is good or bad."""

    column: str
    unit: str = "none"
    colours: Colours = ()


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
    """An axis of shares ends at 1, else it reaches at least so far."""
    floats: bool = False
    """The axis need not begin at 0, as for a loss."""
    missing: str = ""
    """The text in place of a value that is not known."""
    colours: Colours = ()
    names: bool = False
    """A stat shows the names of its series in place of their values."""
    cells: tuple[Cell, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    """The board that a column of a table opens, or with "" as column a value of any other panel."""


class Row(NamedTuple):
    """Panels below a heading."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False
    """Closed until a reader opens it, for panels that are empty in many runs."""


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
