"""Lines over the steps of a run: one shape for the page that is live and for the one in a file. Pure.

A chart is traces by name; what is new of a trace is appended, so that a live page is sent single
points. Figures are plain dictionaries of lists: plotly's own classes cost tens of milliseconds to
check what is checked by a test, and arrays cannot be extended.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeromon.history import IDLE, LEAST, MEDIAN, MOST
from zeromon.snapshot import RankSnapshot, Risk, RunSnapshot

Series = Mapping[str, Sequence[float]]
"""Columns of a history: ``rank``, ``step``, ``duration_us``, ``exposed_us``, ... by name."""

Column = Sequence[float | None]
Trace = tuple[list[float], list[float | None]]
"""Steps, and values."""

GIB = 1 << 30
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999",
)  # fmt: skip
"""Okabe and Ito: told apart by colour-blind eyes, too."""
MOST_POINTS = 600
MOST_RANKS = 8
_WARM_UP = 3
INK, LINE = "#868e96", "rgba(134,142,150,0.22)"
"""Legible on a light page and on a dark one: figures need not be sent anew when it changes."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A level with a name, or a way to it."""

    name: str
    x: tuple[float, float] | None
    """From and to which step; None: everywhere."""
    y: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over steps."""

    title: str
    unit: str
    traces: dict[str, Trace]
    top: float
    """The end of the axis: the first steps, which warm up, may leave it."""
    marks: tuple[Mark, ...] = field(default=())

    def figure(self, height: int = 280) -> dict[str, Any]:
        """For plotly."""
        lines = [
            {
                "type": "scatter", "mode": "lines", "name": name, "x": x, "y": y,
                "line": {"width": 1.6, "color": COLOURS[n % len(COLOURS)]}, "connectgaps": True,
                "hovertemplate": "%{y:.4g} " + self.unit,
            }
            for n, (name, (x, y)) in enumerate(self.traces.items())
        ]  # fmt: skip
        top = max([self.top, *(1.05 * max(mark.y) for mark in self.marks)])
        return {
            "data": [*lines, *(_marked(mark) for mark in self.marks if mark.x is not None)],
            "layout": {
                **layout(self.title, height),
                "xaxis": axis("step"),
                "yaxis": {**axis(self.unit), "range": [0, top]},
                "hovermode": "x unified",
                "shapes": [_level(mark) for mark in self.marks if mark.x is None],
                "annotations": [_named(mark) for mark in self.marks if mark.x is None],
            },
        }

    def newer(self, step: float) -> dict[str, Any] | None:
        """What ``extendData`` takes: the points after *step*; None without any."""
        x: list[list[float]] = []
        y: list[list[float | None]] = []
        for steps, values in self.traces.values():
            begin = next((n for n in range(len(steps), 0, -1) if steps[n - 1] <= step), 0)
            x.append(steps[begin:])
            y.append(values[begin:])
        return {"x": x, "y": y} if any(x) else None

    @property
    def last(self) -> float:
        """The newest step of any trace."""
        return max((x[-1] for x, _ in self.traces.values() if x), default=-1)


def layout(title: str, height: int) -> dict[str, Any]:
    """What all figures have in common."""
    return {
        "title": {"text": title, "font": {"size": 14}, "x": 0.01, "xanchor": "left"},
        "height": height,
        "margin": {"l": 60, "r": 16, "t": 44, "b": 44},
        "font": {"color": INK, "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": list(COLOURS),
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        "uirevision": "kept",
        "hoverlabel": {"namelength": -1},
    }


def axis(title: str) -> dict[str, Any]:
    """One axis."""
    return {"title": {"text": title}, "gridcolor": LINE, "zerolinecolor": LINE, "automargin": True}


def _level(mark: Mark) -> dict[str, Any]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": mark.y[0], "y1": mark.y[1],
        "line": {"dash": "dash", "width": 1.5, "color": "#D55E00"},
    }  # fmt: skip


def _named(mark: Mark) -> dict[str, Any]:
    return {
        "text": mark.name, "xref": "paper", "x": 0, "xanchor": "left", "y": mark.y[0],
        "yanchor": "bottom", "showarrow": False, "font": {"color": "#D55E00", "size": 11},
    }  # fmt: skip


def _marked(mark: Mark) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "name": mark.name, "x": list(mark.x or ()),
        "y": list(mark.y), "line": {"dash": "dot", "width": 1.5, "color": "#D55E00"},
        "hovertemplate": "%{y:.4g}",
    }  # fmt: skip


# ---- columns --------------------------------------------------------------------------------------


def reduced(x: Sequence[float], y: Column, most: int = MOST_POINTS) -> Trace:
    """At most *most* points that look the same: of each stretch its lowest and its highest, in order."""
    if len(x) <= most:
        return list(x), list(y)
    stretch = -(-len(x) * 2 // most)
    kept: list[int] = []
    for begin in range(0, len(x), stretch):
        known = [i for i in range(begin, min(begin + stretch, len(x))) if y[i] is not None]
        if known:
            low = min(known, key=lambda i: y[i] or 0.0)
            high = max(known, key=lambda i: y[i] or 0.0)
            kept += sorted({low, high})
    return [x[i] for i in kept], [y[i] for i in kept]


def by_rank(series: Series, column: Column) -> dict[str, Trace]:
    """The values of each rank; of more than a few ranks the highest, the median and the lowest."""
    found: dict[int, Trace] = {}
    for rank, step, value in zip(series["rank"], series["step"], column, strict=True):
        steps, values = found.setdefault(int(rank), ([], []))
        steps.append(step)
        values.append(value)
    if MOST in found:
        return {_OF_ALL[rank]: pair for rank, pair in sorted(found.items(), reverse=True)}
    if len(found) <= MOST_RANKS:
        return {f"rank {rank}": pair for rank, pair in sorted(found.items())}
    together: dict[float, list[float]] = {}
    for steps, values in found.values():
        for step, value in zip(steps, values, strict=True):
            if value is not None:
                together.setdefault(step, []).append(value)
    order = sorted(together)
    return {name: (list(order), [pick(together[step]) for step in order]) for name, pick in _PICKS}


_PICKS: tuple[tuple[str, Callable[[list[float]], float]], ...] = (
    ("highest rank", max), ("median rank", statistics.median), ("lowest rank", min),
)  # fmt: skip


_OF_ALL = {MOST: "highest rank", MEDIAN: "median rank", LEAST: "lowest rank"}


def _top(series: Series, column: Column) -> float:
    settled = [
        value
        for step, value in zip(series["step"], column, strict=True)
        if value is not None and step > _WARM_UP
    ]
    known = settled or [value for value in column if value is not None]
    return 1.1 * max(known, default=1.0) or 1.0


def _chart(
    series: Series, column: Column, title: str, unit: str, marks: tuple[Mark, ...] = ()
) -> Chart | None:
    if all(value is None for value in column):
        return None
    traces = {name: reduced(*trace) for name, trace in by_rank(series, column).items()}
    return Chart(title, unit, traces, _top(series, column), marks)


# ---- charts ---------------------------------------------------------------------------------------


def step_time(series: Series) -> Chart | None:
    """How long the steps took."""
    return _chart(series, [us / 1e3 for us in series["duration_us"]], "Step time", "ms")


def exposed(series: Series) -> Chart | None:
    """Exposed communication as a share of the step; steps with idle hooks are left out."""
    column = [
        None if int(flags) & IDLE or not spent else 100 * waits / spent
        for flags, waits, spent in zip(
            series["flags"], series["exposed_us"], series["duration_us"], strict=True
        )
    ]
    return _chart(series, column, "Exposed communication", "% of the step")


def memory(series: Series, run: RunSnapshot | None = None) -> Chart | None:
    """Reserved device memory, or on the host the resident set; with its capacity and forecast."""
    device = max(series["reserved_bytes"], default=-1) >= 0
    name = "reserved_bytes" if device else "rss_bytes"
    column = [nbytes / GIB if nbytes >= 0 else None for nbytes in series[name]]
    title = "Device memory, reserved" if device else "Host memory, resident"
    marks = memory_marks(run, "device" if device else "host") if run is not None else ()
    return _chart(series, column, title, "GiB", marks)


def memory_marks(run: RunSnapshot, pool: str) -> tuple[Mark, ...]:
    """The capacity of the fullest rank's device, and the way to it where one is foreseen.

    Ranks share the host: its capacity is no level of a rank's own line, and is left out.
    """
    risks = [(rank, risk) for rank in run.ranks for risk in rank.risks if risk.pool == pool]
    if not risks or pool == "host":
        return ()
    rank, risk = max(risks, key=lambda pair: pair[1].ratio)
    full = risk.capacity_bytes / GIB
    return (Mark("capacity", None, (full, full)), *_way(rank, risk))


def _way(rank: RankSnapshot, risk: Risk) -> list[Mark]:
    ends = (
        ("forecast", risk.steps_left),
        ("soonest", risk.steps_soonest),
        ("latest", risk.steps_latest),
    )
    level = (risk.used_bytes / GIB, risk.capacity_bytes / GIB)
    return [
        Mark(name, (rank.step, rank.step + steps), level)
        for name, steps in ends
        if risk.steps_left is not None and steps is not None
    ]
