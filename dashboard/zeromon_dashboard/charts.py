"""The chart specifications of :mod:`zeromon.readout.charts` as figures of plotly. Pure.

The live page and the HTML report draw the same charts. A chart has traces by name; a live page receives
only their new points. Figures are plain dictionaries of lists: plotly's own classes spend tens of
milliseconds on checks that a test makes, and a browser cannot append to arrays.
"""

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from zeromon.comparison.comparison import letter
from zeromon.readout import charts as specs
from zeromon.readout.charts import ChartSpec, Read, StepRow, rows_of
from zeromon.readout.figures import RATIO
from zeromon.snapshot import RunSnapshot
from zeromon.storage.step_history.queries import LEAST, MEDIAN, MOST

Series = Mapping[str, Sequence[int]]
"""Columns of a history: ``rank``, ``step``, ``duration_us``, ``exposed_us``, ... by name."""

Column = Sequence[float | None]
Trace = tuple[list[float], list[float | None]]
"""Steps, and values."""

GIB, MIB = 1 << 30, 1 << 20
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999",
)  # fmt: skip
"""The palette of Okabe and Ito, which colour-blind people can distinguish."""
MAX_POINTS = 600
MAX_RANKS = 8
_WARM_UP = 3
FEW = 8
"""With fewer steps, an axis has a mark for each."""
_MAX_TRACES, _MAX_BESIDE_TITLE, _MAX_WITHOUT_TITLE = 4, 22, 36
"""Limits of a legend above a chart on a screen of 360 pixels: lines, and characters of their names."""
SUM = "sum"
"""The line of the sum over the ranks; the colours of the palette are for ranks and runs."""
LEGEND_BELOW = {"legend": {"orientation": "h", "y": -0.32, "yanchor": "top", "x": 0}}
"""For more traces than fit beside the title of a chart of half the page's width."""
INK, LINE, WARM = "#868e96", "rgba(134,142,150,0.22)", COLOURS[5]
"""Legible on a light and on a dark page, so that switching does not need new figures."""
_HOVER_LABEL = {
    "namelength": -1, "bgcolor": "#1c2329", "bordercolor": INK, "font": {"color": "#f1f3f5", "size": 12},
}  # fmt: skip
"""Legible on a light and on a dark page, unlike text on the colour of a line."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A named level, or a line that leads to it."""

    name: str
    x: tuple[float, float] | None
    """First and last step; None: the whole width."""
    y: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over steps."""

    title: str
    unit: str
    traces: dict[str, Trace]
    top: float
    """The end of the axis; the first steps, which warm up, may exceed it."""
    marks: tuple[Mark, ...] = field(default=())
    steps: tuple[int, int] | None = None
    """The ends of the axis; None: as far as the lines go."""
    events: tuple[tuple[int, str], ...] = ()
    """Steps that are marked, and what happened there."""
    height: int = 280
    """Pixels."""
    titled: bool = True
    """False where the page has the title above the figure."""

    def figure(self) -> dict[str, Any]:
        """The chart as a figure of plotly."""
        # The sum counts as no line, so that a rank has one colour in every chart
        numbers = {name: n for n, name in enumerate(name for name in self.traces if name != SUM)}
        colours = {name: COLOURS[n % len(COLOURS)] for name, n in numbers.items()}
        scatters = [
            {
                "type": "scatter", "mode": "lines" if len(x) > 1 else "markers",
                "name": name, "x": x, "y": y, "connectgaps": True,
                "line": {"width": 1.6, "color": colours.get(name, INK)},
                "hovertemplate": "%{y:.4g} " + self.unit,
            }
            for name, (x, y) in self.traces.items()
        ]  # fmt: skip
        if not any(x for x, _ in self.traces.values()):
            return empty_figure(self.title if self.titled else "")
        max_characters = _MAX_BESIDE_TITLE if self.titled else _MAX_WITHOUT_TITLE
        is_crowded = len(self.traces) > _MAX_TRACES or sum(map(len, self.traces)) > max_characters
        levels = [mark for mark in self.marks if mark.x is None]
        first_step = min((x[0] for x, _ in self.traces.values() if x), default=0.0)
        # Others would stretch the axis
        events = [event for event in self.events if first_step <= event[0] <= self.last]
        low = min((v for _, y in self.traces.values() for v in y if v is not None), default=0.0)
        top = max([self.top, *(1.05 * max(mark.y) for mark in self.marks)])
        # Below the name of a level, which it would cross
        line_top = min((0.98 * mark.y[0] / top for mark in levels), default=1)
        return plotly_figure(
            [*scatters, *(_mark_trace(mark) for mark in self.marks if mark.x is not None)],
            self.title if self.titled else "",
            self.height + 60 * is_crowded,
            **(LEGEND_BELOW if is_crowded else {}),
            xaxis=step_axis(self.steps, self.last),
            yaxis={**titled_axis(self.unit), "range": [min(0.0, 1.1 * low), top], "fixedrange": True},
            uirevision=str(self.steps),  # else a zoom of before outlives a new range
            hovermode="x unified",
            shapes=[
                *(drawn_line(WARM, "dash", xref="paper", x=(0, 1), y=mark.y) for mark in levels),
                *(drawn_line(WARM, "dot", yref="paper", x=(x, x), y=(0, line_top)) for x, _ in events),
            ],
            annotations=[
                *(drawn_label(WARM, mark.name, xref="paper", x=0, y=mark.y[0]) for mark in levels),
                *(drawn_label(WARM, escape(name), yref="paper", x=x, y=0) for x, name in events),
            ],
        )

    def newer(self, step: float) -> dict[str, Any] | None:
        """The points after *step*, as ``extendData`` takes them; None without any."""
        x: list[list[float]] = []
        y: list[list[float | None]] = []
        for steps, values in self.traces.values():
            start = next((n for n in range(len(steps), 0, -1) if steps[n - 1] <= step), 0)
            x.append(steps[start:])
            y.append(values[start:])
        return {"x": x, "y": y} if any(x) else None

    @property
    def last(self) -> float:
        """The newest step of any trace."""
        return max((x[-1] for x, _ in self.traces.values() if x), default=-1)


_MAX_TITLE_LINE = 46
"""Characters that fit a screen of 360 pixels, where plotly would cut a longer line."""


def plotly_figure(data: list[Any], title: str, height: int, **layout: Any) -> dict[str, Any]:
    """A figure of the traces *data*; *layout*: of its layout, beside what all figures share."""
    # Above the legend, which it would overlap on a narrow screen; in pixels for tall figures
    title_lines = textwrap.wrap(title, _MAX_TITLE_LINE, break_long_words=False)
    extra_height = 18 * len(title_lines[1:])
    title_position = {"x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 9 + extra_height * 2 // 3}}
    shared = {
        "title": {"text": "<br>".join(title_lines), "font": {"size": 14}, **title_position},
        "height": height + extra_height,
        "margin": {"l": 60, "r": 16, "t": 60 + extra_height if title else 24, "b": 44},
        "font": {"color": INK, "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        "uirevision": "kept",
        "hoverlabel": _HOVER_LABEL,
    }
    return {"data": data, "layout": {**shared, **layout}}


def empty_figure(title: str) -> dict[str, Any]:
    """A figure without values: its *title*, which says why."""
    hidden = {"visible": False}
    return plotly_figure([], title, 60, xaxis=hidden, yaxis=hidden)


def titled_axis(title: str) -> dict[str, Any]:
    """An axis with a title."""
    head = {"text": title, "standoff": 6}
    return {"title": head, "gridcolor": LINE, "zerolinecolor": LINE, "automargin": True}


def step_axis(steps: tuple[int, int] | None, count: float = FEW) -> dict[str, Any]:
    """The axis of *count* steps, from first to last of *steps*; a drag over it chooses others."""
    marks = {"dtick": 1} if count < FEW else {}
    span = {} if steps is None else {"range": [steps[0] - 0.5, steps[1] + 0.5]}
    head = {"unifiedhovertitle": {"text": "step %{x:,d}"}}
    return {**titled_axis("step"), **span, **marks, **head, "tickformat": ",d", "hoverformat": ",d"}


def drawn_line(colour: str, dash: str, x: Sequence[float], y: Sequence[float], **axes: Any) -> Any:
    """A line across a figure, from the first to the second of *x* and *y*."""
    corners = {"x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1]}
    return {"type": "line", **corners, "line": {"dash": dash, "width": 1.5, "color": colour}, **axes}


def drawn_label(colour: str, label: str, **position: Any) -> dict[str, Any]:
    """A text that begins at, and stands on, *position*."""
    anchor = {"xanchor": "left", "yanchor": "bottom", "showarrow": False}
    return {"text": label, **anchor, "font": {"color": colour, "size": 11}, **position}


_DASHES = {"soonest": "dashdot", "latest": "solid"}


def _mark_trace(mark: Mark) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "name": mark.name, "x": list(mark.x or ()),
        "y": list(mark.y), "line": {"dash": _DASHES.get(mark.name, "dot"), "color": WARM},
        "hovertemplate": "%{y:.4g}",
    }  # fmt: skip


# ---- columns --------------------------------------------------------------------------------------


def reduce_points(x: Sequence[float], y: Column, max_points: int = MAX_POINTS) -> Trace:
    """*max_points* or so that look the same: the lowest and the highest of each range, in order."""
    if len(x) <= max_points:
        return list(x), list(y)
    stretch = -(-len(x) * 2 // max_points)
    indexes: list[int] = []
    for start in range(0, len(x), stretch):
        valid = [i for i in range(start, min(start + stretch, len(x))) if y[i] is not None]
        if valid:
            low = min(valid, key=lambda i: y[i] or 0.0)
            high = max(valid, key=lambda i: y[i] or 0.0)
            indexes += sorted({low, high})
    return [x[i] for i in indexes], [y[i] for i in indexes]


def traces_by_rank(series: Series, column: Column) -> dict[str, Trace]:
    """The values of each rank; of more than :data:`MAX_RANKS` the highest, median and lowest value."""
    ranks = set(series["rank"])
    if len(ranks) > MAX_RANKS:
        return _traces_over_ranks(series["step"], column)
    traces: dict[int, Trace] = {rank: ([], []) for rank in sorted(ranks, reverse=MOST in ranks)}
    for rank, step, value in zip(series["rank"], series["step"], column, strict=True):
        steps, values = traces[rank]
        steps.append(step)
        values.append(value)
    return {_OF_ALL.get(rank, f"rank {rank}"): trace for rank, trace in traces.items()}


def _traces_over_ranks(steps: Sequence[float], column: Column) -> dict[str, Trace]:
    """The highest, the median and the lowest value of each step."""
    by_step = _values_by_step(steps, column)
    return {name: (list(by_step), [*map(pick, by_step.values())]) for name, pick in _PICKS}


def _values_by_step(steps: Sequence[float], column: Column) -> dict[float, list[float]]:
    """Step -> the known values of its ranks, in the order of steps."""
    by_step: dict[float, list[float]] = {}
    for step, value in zip(steps, column, strict=True):
        if value is not None:
            by_step.setdefault(step, []).append(value)
    return dict(sorted(by_step.items()))


_PICKS: tuple[tuple[str, Callable[[list[float]], float]], ...] = (
    ("highest rank", max), ("median rank", statistics.median), ("lowest rank", min),
)  # fmt: skip


_OF_ALL = {MOST: "highest rank", MEDIAN: "median rank", LEAST: "lowest rank"}


def _top_of_axis(steps: Sequence[float], column: Column) -> float:
    """The end of the axis: above all values but those of the first steps, which warm up."""
    steady = [
        value for step, value in zip(steps, column, strict=True) if value is not None and step > _WARM_UP
    ]
    values = steady or [value for value in column if value is not None]
    return 1.1 * max([0.0, *values]) or 1.0


# ---- chart specifications -------------------------------------------------------------------------


def charts_of(
    series: Series, run: RunSnapshot, steps: tuple[int, int] | None = None
) -> dict[str, Chart]:
    """Every chart of *run* by its name, of *steps*; one without a known value has no traces."""
    rows = rows_of(series)
    return {
        spec.name: _chart_of_spec(spec, series, rows, run, steps) or _empty_chart(spec, series, steps)
        for spec in specs.charts_of(run.ranks)
    }


def overlaid_charts(
    runs: Sequence[tuple[RunSnapshot, Series]], steps: tuple[int, int] | None = None
) -> dict[str, Chart]:
    """The charts of the first run with a line of each of *runs*: its fullest, or its median, rank."""
    # By id, because a series is a dict, which has no hash; once here, and not for each chart
    columns = {id(series): rows_of(series) for _, series in runs}
    return {
        spec.name: _overlaid_chart(spec, runs, columns, steps) or _empty_chart(spec, runs[0][1], steps)
        for spec in specs.charts_of(runs[0][0].ranks)
    }


def _overlaid_chart(
    spec: ChartSpec,
    runs: Sequence[tuple[RunSnapshot, Series]],
    rows: Mapping[int, Sequence[StepRow]],
    steps: tuple[int, int] | None,
) -> Chart | None:
    read_value, scale, unit = _scaled_reader(spec)
    trace_name = "highest rank" if spec.pool else "median rank"
    traces, missing, top = dict[str, Trace](), [], 0.0
    for number, (run, series) in enumerate(runs):
        name = f"{letter(number)} {run.run}"
        has_chart = spec in specs.charts_of(run.ranks)
        column = _column_of(rows[id(series)], read_value, scale) if has_chart else []
        if all(value is None for value in column):
            missing.append(letter(number))
            traces[name] = ([], [])  # so that the others keep their colours
            continue
        rank_traces = (
            traces_by_rank(series, column)
            if MOST in series["rank"]
            else _traces_over_ranks(series["step"], column)
        )
        traces[name] = reduce_points(*rank_traces[trace_name])
        top = max(top, _top_of_axis(*rank_traces[trace_name]))
    lacking = f"; n/a of {', '.join(missing)}" if missing else ""
    title = f"{_chart_title(spec)}, {trace_name}{lacking}"
    return Chart(title, unit, traces, top, (), steps) if len(missing) < len(runs) else None


_MAX_DIFFERENCES = 200


def difference_chart(overlaid: Chart) -> Chart | None:
    """The distance of each line of *overlaid* from its first one; None without a common step.

    Of more than :data:`_MAX_DIFFERENCES` common steps, the medians of equal ranges are compared.
    """
    base_name = next(iter(overlaid.traces))
    spans = [(steps[0], steps[-1]) for steps, _ in overlaid.traces.values() if steps]
    first_step, last_step = max(span[0] for span in spans), min(span[1] for span in spans)
    width = max(1, math.ceil((last_step - first_step + 1) / _MAX_DIFFERENCES))
    medians = {
        name: {
            step: statistics.median(values)
            for step, values in _values_by_step([step // width * width for step in x], y).items()
            if first_step // width * width <= step <= last_step
        }
        for name, (x, y) in overlaid.traces.items()
    }
    base = medians.pop(base_name)
    changes = {
        name: {step: value - base[step] for step, value in by_step.items() if step in base}
        for name, by_step in medians.items()
    }
    if not any(changes.values()):
        return None
    largest = max(abs(value) for change in changes.values() for value in change.values())
    scale, unit = (GIB // MIB, "MiB") if overlaid.unit == "GiB" and largest < 0.5 else (1, overlaid.unit)
    changes = {base_name: dict.fromkeys(base, 0.0), **changes}
    traces: dict[str, Trace] = {
        name: ([*change], [scale * value for value in change.values()])
        for name, change in changes.items()
    }
    window = f", median of {width} steps" if width > 1 else ""
    title = f"{overlaid.title.partition(',')[0]} minus {base_name[:1]}{window}"
    highest = scale * max(value for change in changes.values() for value in change.values())
    axis_steps = round(min(span[0] for span in spans)), round(max(span[1] for span in spans))
    return Chart(title, unit, traces, 1.1 * max(highest, 0.1 * scale * largest) or 1.0, (), axis_steps)


def _empty_chart(spec: ChartSpec, series: Series, steps: tuple[int, int] | None) -> Chart:
    """The chart *spec* where no step has its value: the title and the reason, and no axes."""
    reason = "not measured" if series["step"] else "no completed step"
    if steps is not None:
        reason = f"no value of step {steps[0]:,} to {steps[1]:,} is known"
    return Chart(f"{_chart_title(spec)}: {reason}", "", {}, 1.0)


def _chart_title(spec: ChartSpec) -> str:
    title = f"{spec.title}, {spec.quantity}" if spec.quantity else spec.title
    return title[:1].upper() + title[1:]


def _chart_of_spec(
    spec: ChartSpec,
    series: Series,
    rows: Sequence[StepRow],
    run: RunSnapshot,
    steps: tuple[int, int] | None,
) -> Chart | None:
    """The lines of *spec*, and the limit and the forecast that *run* has; None without a value."""
    read_value, scale, unit = _scaled_reader(spec)
    column = _column_of(rows, read_value, scale)
    if all(value is None for value in column):
        return None
    traces = {name: reduce_points(*trace) for name, trace in traces_by_rank(series, column).items()}
    summed = spec.shared and MOST not in series["rank"]
    if summed and len(set(series["rank"])) > 1:
        # The sum over the ranks of each step that all of them have taken
        ranks, by_step = len(set(series["rank"])), _values_by_step(series["step"], column)
        complete = {step: sum(values) for step, values in by_step.items() if len(values) == ranks}
        traces = {SUM: reduce_points(list(complete), list(complete.values())), **traces}
    if len(set(series["rank"])) == 1:
        for name, read_other in spec.beside:
            traces[name] = reduce_points(series["step"], _column_of(rows, read_other, scale))
    limit = specs.limit_of(spec, run.ranks)
    marks = limit_marks_of(spec, limit) if summed or not spec.shared else ()
    top = max(_top_of_axis(series["step"], column), *(_top_of_axis(*trace) for trace in traces.values()))
    return Chart(_chart_title(spec), unit, traces, top, marks, steps)


def _column_of(rows: Sequence[StepRow], read_value: Read, scale: float) -> list[float | None]:
    return [None if (value := read_value(row)) is None else value * scale for row in rows]


def _scaled_reader(spec: ChartSpec) -> tuple[Read, float, str]:
    if spec.share is not None:
        return spec.share, RATIO.scale, f"{RATIO.symbol} of the step"
    return spec.read, spec.unit.scale, spec.unit.symbol


def limit_marks_of(spec: ChartSpec, limit: specs.Limit | None) -> tuple[Mark, ...]:
    """The capacity of the fullest rank's memory, and the forecasts of when it is reached.

    Of a quantity that ranks share, both are of their sum; a capacity far above is not drawn.
    """
    if limit is None or not limit.nbytes:
        return ()
    if spec.shared and limit.risk.used_bytes < specs.FAR * limit.nbytes and not limit.risk.steps_left:
        return ()
    scale, step = spec.unit.scale, limit.rank.steps.last_step
    full = limit.risk.capacity_bytes * scale
    forecasts = (
        Mark(forecast.name, (step, step + forecast.steps), (forecast.used_bytes * scale, full))
        for forecast in specs.forecasts_of(limit)
    )
    return (Mark("capacity", None, (full, full)), *forecasts)
