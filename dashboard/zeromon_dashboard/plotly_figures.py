"""Predicted changes, and memory by stack, as figures. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any, NamedTuple

import plotly.graph_objects as go

from zeromon.base.units import (
    byte_scale,
    human_bytes,
    human_count,
    human_rate,
    human_ratio,
    human_seconds,
)
from zeromon.readout import rank_map, text
from zeromon.readout.breakdown import PART_NAMES, PARTS, WINDOW, rank_parts
from zeromon.readout.charts import EVERYTHING_ELSE, RoleBands, Step, StepRow, rows_of
from zeromon.readout.figures import FIGURE, Unit, mean_step_seconds
from zeromon.readout.ledger import USEFUL, JobLedger, cause_text, goodput_headline, job_ledger
from zeromon.readout.rank_map import map_ranks
from zeromon.snapshot import CollectiveStatsRow, RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import SIZE_BOUNDS
from zeromon.snapshot.ledger import Cause
from zeromon.snapshot.run import FleetNode
from zeromon.snapshot.step import Lanes, LaneSpan, LaneStep, LateArrival, Stream
from zeromon.traces.allocations import NO_STACK, ROLES, UNKNOWN, Holding, frame_text, telling_frames
from zeromon_dashboard.charts import (
    COLOURS,
    GIB,
    INK,
    LEGEND_BELOW,
    LINE,
    WARM,
    Series,
    drawn_label,
    drawn_line,
    plotly_figure,
    step_axis,
    titled_axis,
)


def whatif_figure(content: dict[str, Any]) -> go.Figure:
    """Device memory against milliseconds per sample, of what ``zeromon plan --changes`` predicts."""
    timed = [p for p in content["points"] if p.get("step_seconds") is not None]
    max_bytes = max((p["bytes"]["device"] for p in timed), default=0)
    size, unit = byte_scale(max_bytes)
    frontier = sorted((p for p in timed if p["pareto"]), key=lambda p: p["bytes"]["device"])
    data = [
        {
            "type": "scatter", "name": name, "mode": mode, "marker": {"size": 9, "color": colour},
            "x": [p["bytes"]["device"] / size for p in points],
            "y": [1e3 * p["step_seconds"] / p["samples"] for p in points],
            "text": [*map(change_text, points)],
            "hovertemplate": "%{text}<br>%{x:.2f} " + unit + ", %{y:.2f} ms<extra></extra>",
        }
        for name, points, mode, colour in (
            ("predicted", timed, "markers", COLOURS[0]),
            (PARETO, frontier, "lines+markers", COLOURS[1]),
        )
    ]  # fmt: skip
    title = f"{content['model']}: memory of one of {content['devices']} devices against time"
    x, y = titled_axis(f"device memory, {unit}"), titled_axis("ms per sample")
    chart = go.Figure(plotly_figure(data, escape(title), 380, xaxis=x, yaxis=y, **LEGEND_BELOW))
    if (usable := content["usable_bytes"]) is not None:
        chart.add_vline(
            x=usable / size, line_dash="dash", annotation_text=f"usable: {human_bytes(usable)}"
        )
    return chart


PARETO = "no other is smaller and faster"
"""Meaning of the mark of a predicted point."""


def change_text(point: dict[str, Any]) -> str:
    """The settings that a predicted point changes."""
    return " ".join(f"{k}={v}" for k, v in point["change"].items()) or "as it is"


_MAX_STACKS = 400
_DEEPEST = 40
_ROLE_COLOURS = {
    role: "rgba({}, {}, {}, 0.45)".format(*bytes.fromhex(colour[1:]))
    for role, colour in zip(ROLES, (*COLOURS[:6], COLOURS[-1]), strict=True)
}
"""So pale that text is legible on them, on a light and on a dark page."""


def flame_graph(title: str, holdings: Sequence[Holding]) -> dict[str, Any]:
    """Memory by role, then by stack from the outermost frame to the innermost, as an icicle."""
    nodes: dict[tuple[str, ...], int] = defaultdict(int)
    for number, holding in enumerate(holdings):
        frames = [frame_text(frame) for frame in reversed(telling_frames(holding.stack))][-_DEEPEST:]
        if number >= _MAX_STACKS:
            frames = ["other stacks"]
        path = (holding.role, *(frames or [NO_STACK]))
        for depth in range(len(path) + 1):
            nodes[path[:depth]] += holding.nbytes
    numbers = {path: str(number) for number, path in enumerate(nodes)}
    icicle = {
        "type": "icicle", "branchvalues": "total", "tiling": {"orientation": "v"},
        "ids": list(numbers.values()),
        "parents": [numbers[path[:-1]] if path else "" for path in nodes],
        # plotly reads tags such as <a href> in a label, and frames come from the file
        "labels": [escape(path[-1]) if path else "all" for path in nodes],
        "values": list(nodes.values()),
        "text": [human_bytes(nbytes) for nbytes in nodes.values()],
        "marker": {"colors": [_ROLE_COLOURS[path[0] if path else UNKNOWN] for path in nodes]},
        "hovertemplate": "%{label}<br>%{text}, %{percentRoot} of all<extra></extra>",
        "textinfo": "label+text", "sort": False,
    }  # fmt: skip
    deep = max((len(path) for path in nodes), default=0)
    return plotly_figure([icicle], title, 120 + 28 * deep, margin={"t": 48, "l": 8, "r": 8, "b": 8})


# ---- figures of one snapshot of a run, as plain dictionaries for plotly -------------------------

NO_CENSUS = "Memory by role: no census has been taken yet"
_MAX_BARS = 16
_MAX_UNITS = 80
_STEPS_OF_HEAT = 60
_WIDE = 32
_FROM_THE_TOP = {**titled_axis(""), "autorange": "reversed"}
"""An axis of rows, the first at the top."""
_COMPUTE, _COMMUNICATION, _WAITING, _OWN, _FATAL = (
    "#0b66ab", "#7d57ad", "#e08a1e", "#9aa3ad", "#c62828",
)  # fmt: skip
"""The colours of assets/zeromon.css that have the same names; each has one meaning."""
PHASE_COLOURS = {
    "forward": "#3f95d0", "backward": _COMPUTE, "optimizer": "#5b86b8", "cpu_optimizer": "#8fb3d6",
    "exposed": _COMMUNICATION, "data_wait": _WAITING, "evaluation": "#7a8591", "checkpoint": "#b3a57a",
    "garbage_collection": "#8a5f3c", "compile": "#5f6974", "generation": "#1d4271", "other": _OWN,
}  # fmt: skip
_CAUSE_COLOURS = {
    **dict.fromkeys(USEFUL, _COMPUTE), Cause.EXPOSED: _COMMUNICATION,
    **dict.fromkeys((Cause.WAITING, Cause.DATA, Cause.HANG, Cause.STALL), _WAITING),
    **dict.fromkeys((Cause.DEAD, Cause.LOST), _FATAL),
}  # fmt: skip


def ledger_figure(run: RunSnapshot) -> dict[str, Any] | None:
    """A waterfall: every second of all ranks and attempts, cause by cause; None without a second."""
    job = job_ledger([run])
    if not job.rows:
        return None
    names = [*map(cause_text, job.rows), "all"]
    shares = [human_ratio(job.share(row)) for row in job.rows]
    start_seconds = [*accumulate((row.seconds for row in job.rows), initial=0.0)]
    data = {
        "type": "bar", "orientation": "h", "y": names,
        "base": [*start_seconds[:-1], 0], "x": [*(row.seconds for row in job.rows), job.rank_seconds],
        "text": [*shares, human_seconds(job.rank_seconds)],
        "textposition": "outside", "cliponaxis": False,
        "marker": {"color": [*(_CAUSE_COLOURS.get(row.cause, _OWN) for row in job.rows), LINE]},
        "customdata": [*(_trained_amount_text(job, row.seconds) for row in job.rows), ""],
        "hovertemplate": "%{x:.3g} s%{customdata}<extra>%{y}</extra>",
    }  # fmt: skip
    title = f"Where the ranks' time went: {goodput_headline(job)}"
    return plotly_figure(
        [data],
        title,
        110 + 24 * len(names),
        # room for the text beside the last bars
        xaxis={**titled_axis("s"), "range": [0, 1.15 * job.rank_seconds]},
        yaxis=_FROM_THE_TOP,
    )


def _trained_amount_text(job: JobLedger, seconds: float) -> str:
    """The amount that *seconds* would have trained: ``, 12,300 tokens``; "" where that is not known."""
    return f", {human_count(seconds * job.per_second)} {job.unit}" if job.unit else ""


def step_breakdown(run: RunSnapshot) -> dict[str, Any] | None:
    """A bar for each rank, or for the slowest ones: where a step goes; None where that is unknown."""
    ranks = sorted(run.ranks, key=lambda rank: -(rank.steps.median_seconds or 0.0))[:_MAX_BARS]
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    phases_of = {rank.rank: rank_parts(rank) for rank in ranks}
    names = [f"rank {rank.rank}" for rank in ranks]
    data = []
    for phase in PARTS:
        x = [1e3 * phases_of[rank.rank].get(phase, 0.0) for rank in ranks]
        if any(x):
            data.append(
                {
                    "type": "bar", "orientation": "h", "y": names, "x": x,
                    "name": PART_NAMES[phase], "marker": {"color": PHASE_COLOURS[phase]},
                    "hovertemplate": "%{x:.3g} ms<extra>%{y}, %{fullData.name}</extra>",
                }
            )  # fmt: skip
    if not data:
        return None
    total = len(run.ranks) if run.fleet is None else run.fleet.ranks
    omission = f" ({len(ranks)} slowest of {total:,})" if total > len(ranks) else ""
    title = f"Where a step goes, ms, mean of the last {WINDOW}{omission}"
    return plotly_figure(
        data,
        title,
        max(220, 110 + 24 * len(ranks)),
        barmode="stack",
        xaxis=titled_axis(""),
        yaxis=_FROM_THE_TOP,
        legend={"orientation": "h", "y": -0.12, "yanchor": "top", "x": 0, "traceorder": "normal"},
    )


def roles_figure(rank: RankSnapshot) -> dict[str, Any] | None:
    """Memory by role, measured against predicted and against plain ZeRO; None without a census."""
    rows = [
        row for row in rank.memory.expected if (row.measured_bytes or 0) + (row.predicted_bytes or 0)
    ]
    if not rows:
        return None
    names = [row.role.replace("_", " ") for row in rows]
    max_bytes = max(max(r.measured_bytes or 0, r.predicted_bytes or 0, r.plain_bytes) for r in rows)
    scale, unit = byte_scale(max_bytes)
    columns: tuple[tuple[str, list[int | None], str], ...] = (
        ("measured", [row.measured_bytes for row in rows], COLOURS[0]),
        ("predicted", [row.predicted_bytes for row in rows], COLOURS[4]),
        ("plain ZeRO", [row.plain_bytes for row in rows], COLOURS[7]),
    )
    data = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": names,
            "x": [None if nbytes is None else nbytes / scale for nbytes in values],
            "text": [human_bytes(nbytes) if nbytes is not None else "" for nbytes in values],
            "textposition": "outside", "cliponaxis": False, "marker": {"color": colour},
            "hovertemplate": "%{y}: %{text}<extra>%{fullData.name}</extra>",
        }
        for name, values, colour in columns
    ]  # fmt: skip
    return plotly_figure(
        data,
        f"Memory of rank {rank.rank} by role",
        120 + 62 * len(rows),
        barmode="group",
        xaxis={**titled_axis(f"{unit}, device, host and disk"), "range": [0, 1.35 * max_bytes / scale]},
        yaxis=_FROM_THE_TOP,
    )


def role_bands_figure(bands: RoleBands) -> dict[str, Any]:
    """Memory by role over the steps, one band above the other, up to all that the rank holds."""
    scale, unit = byte_scale(max(map(sum, zip(*bands.bands.values(), strict=True))))
    measure = {"device": "reserved on its device", "host": "resident"}[bands.place]
    title = f"Memory of rank {bands.rank} by role, to step {bands.steps[-1]:,}"
    grey = {"line": {"width": 0.5, "color": COLOURS[-1]}}
    data = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "held", "name": name,
            "x": bands.steps, "y": [nbytes / scale for nbytes in values],
            "line": {"width": 0.5}, "customdata": list(map(human_bytes, values)),
            "hovertemplate": "%{customdata}", **(grey if name == EVERYTHING_ELSE else {}),
        }
        for name, values in bands.bands.items()
    ]  # fmt: skip
    above_zero = {**titled_axis(f"{unit}, {measure}"), "rangemode": "tozero"}
    unified = {"hovermode": "x unified", "colorway": list(COLOURS), **LEGEND_BELOW}
    return plotly_figure(data, title, 360, xaxis=step_axis(None), yaxis=above_zero, **unified)


def unit_peaks_figure(rank: RankSnapshot) -> dict[str, Any] | None:
    """The most bytes allocated while each unit ran, in the order of its model; None where unknown."""
    units = [unit for unit in rank.communication.units if unit.peak_allocated_bytes >= 0][:_MAX_UNITS]
    if not units:
        return None
    data = {
        "type": "scatter", "mode": "lines+markers",
        "line": {"shape": "hvh", "width": 1.6, "color": COLOURS[0]},
        "x": [shorten_name(unit.fqn or "(root)") for unit in units],
        "y": [unit.peak_allocated_bytes / GIB for unit in units],
        "customdata": [unit.fqn for unit in units],
        "hovertemplate": "%{customdata}: %{y:.3f} GiB<extra></extra>",
    }  # fmt: skip
    x, y = {**titled_axis(""), "type": "category"}, {**titled_axis("GiB"), "rangemode": "tozero"}
    title = f"Peak allocated memory by unit, rank {rank.rank}"
    return plotly_figure([data], title, 300, xaxis=x, yaxis=y)


def shorten_name(name: str, width: int = 32) -> str:
    """A long name by its end, in which units differ."""
    return name if len(name) <= width else "…" + name[1 - width :]


def sizes_figure(rank: RankSnapshot) -> dict[str, Any] | None:
    """How many collectives of each size; None without any."""
    bounds = [*(f"≤ {human_bytes(bound).replace('.0', '')}" for bound in SIZE_BOUNDS), "larger"]
    indexes = [n for n in range(len(bounds)) if any(row.calls[n] for row in rank.communication.sizes)]
    if not indexes:
        return None
    data = [
        {
            "type": "bar", "name": row.op, "marker": {"color": _operation_colour(rank, row.op)},
            "x": [bounds[n] for n in indexes], "y": [row.calls[n] for n in indexes],
            "hovertemplate": "%{y} calls<extra>%{fullData.name}, %{x}</extra>",
        }
        for row in rank.communication.sizes
    ]  # fmt: skip
    title, calls = f"Collectives of rank {rank.rank} by size", titled_axis("calls in timed steps")
    bars = {"barmode": "stack", **LEGEND_BELOW}
    return plotly_figure(data, title, 320, xaxis=titled_axis(""), yaxis=calls, **bars)


def _operation_colour(rank: RankSnapshot, op: str) -> str:
    """The colour of an operation, the same in all figures of a rank."""
    communication = rank.communication
    names = [row.op for row in communication.sizes] + [row.op for row in communication.traffic]
    operations = sorted(set(names))
    return COLOURS[operations.index(op) % len(COLOURS)]


def bandwidth_figure(rank: RankSnapshot) -> dict[str, Any] | None:
    """Bus bandwidth against the size of a call, a point a unit and operation; None without any."""
    rows = [row for row in rank.communication.traffic if row.busbw_bytes_per_second and row.calls]
    if not rows:
        return None
    data = []
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": op,
                "marker": {"size": 9, "color": _operation_colour(rank, op)},
                "x": [row.nbytes / row.calls for row in mine],
                "y": [(row.busbw_bytes_per_second or 0.0) / 1e9 for row in mine],
                "customdata": [*map(_call_hover_text, mine)],
                "hovertemplate": "%{customdata}<extra>%{fullData.name}</extra>",
            }
        )  # fmt: skip
    sizes = sorted({row.nbytes / row.calls for row in rows})
    sizes = sizes[:: 1 + len(sizes) // 7]
    peaks = rank.communication.links
    links = None if peaks is None else peaks.device_bytes_per_second
    peak_y = () if links is None else ((links / 1e9, links / 1e9),)
    return plotly_figure(
        data,
        f"Bus bandwidth of rank {rank.rank} by size of a call",
        320,
        xaxis={
            **titled_axis("bytes per call"),
            "type": "log",
            "tickvals": sizes,
            "ticktext": [*map(human_bytes, sizes)],
        },  # plotly's own marks of a logarithmic axis may all lie outside
        yaxis={**titled_axis("GB/s"), "rangemode": "tozero"},
        shapes=[drawn_line(WARM, "dash", (0, 1), y, xref="paper") for y in peak_y],
        **LEGEND_BELOW,
    )


def _call_hover_text(row: CollectiveStatsRow) -> str:
    speed = f"{human_bytes(row.nbytes / row.calls)} per call at {human_rate(row.busbw_bytes_per_second)}"
    return f"{row.unit or row.group}, {row.phase.replace('_', ' ')}<br>{speed}"


def own_time_figure(
    run: RunSnapshot, series: Series, steps: tuple[int, int] | None = None
) -> dict[str, Any] | None:
    """Each rank's step time without exposed communication, minus the median of all ranks, milliseconds.

    Of the newest steps of *run*, or of *steps* in *series*. In synchronous training all ranks' steps are
    equally long; what differs is the time without waiting. None where fewer than two ranks have timed
    the same steps.
    """
    own_ms: dict[int, dict[int, float]]
    if steps is None:
        own_ms = {
            # Twice as many as are drawn: ranks may be some steps apart, and only common steps count
            rank.rank: _own_milliseconds(rank.steps.recent[-2 * _STEPS_OF_HEAT :])
            for rank in run.ranks
        }
        max_steps = _STEPS_OF_HEAT
    else:
        by_rank: dict[int, list[StepRow]] = {}
        for number, row in zip(series["rank"], rows_of(series), strict=True):
            by_rank.setdefault(number, []).append(row)
        own_ms = {number: _own_milliseconds(rows) for number, rows in by_rank.items()}
        max_steps = len(series["step"])
    common = sorted(set.intersection(*map(set, own_ms.values())))[-max_steps:] if own_ms else []
    if len(own_ms) < 2 or not common:
        return None
    medians = {step: statistics.median(steps[step] for steps in own_ms.values()) for step in common}
    z = [[round(steps[step] - medians[step], 4) for step in common] for steps in own_ms.values()]
    # Where all ranks are equally fast, a scale from 0 to 0 has no colours
    limit = max(1e-3, *(abs(value) for row in z for value in row))
    data = {
        "type": "heatmap", "z": z, "x": common, "y": [f"rank {n}" for n in own_ms],
        "colorscale": [[0, "#0072B2"], [0.5, "#f1f3f5"], [1, "#D55E00"]],
        "zmin": -limit, "zmax": limit,
        "colorbar": {**_colour_bar("ms"), "tickvals": [-limit, 0, limit], "tickformat": "+.3~g"},
        "hovertemplate": "%{y}, step %{x}: %{z:+.3g} ms<extra></extra>",
    }  # fmt: skip
    return plotly_figure(
        [data],
        "Step time without waiting, against median",
        136 + min(500, 26 * len(z)),
        xaxis=step_axis(steps, len(common)),
        uirevision=str(steps),
        yaxis={**_FROM_THE_TOP, "fixedrange": True},
    )


def _own_milliseconds(steps: Sequence[Step]) -> dict[int, float]:
    """Milliseconds of each timed step that were not exposed communication."""
    return {step.step: 1e3 * step.seconds - step.exposed_ns / 1e6 for step in steps if step.timed}


def _colour_bar(unit: str) -> dict[str, Any]:
    return {"title": {"text": unit}, "thickness": 10, "nticks": 3}


def rank_map_figure(run: RunSnapshot, metric: str) -> dict[str, Any]:
    """A cell with its number for each rank, a row or more for each node; of a larger run a cell a node.

    The scale is around the median, so that equal ranks have one colour. The rank that failed first, or
    those that a hang waits for, have a frame.
    """
    mapped = FIGURE[metric]
    unit = mapped.unit
    ranks_map = map_ranks(run, mapped, run.ranks)
    by_node = {
        node: [_drawn_cell(cell, unit) for cell in row] for node, row in ranks_map.by_node.items()
    }
    counts = map(len, by_node.values())
    wide = min(_WIDE, max(8, *counts, 0))
    rows = [
        (name if not n else "", cells[n : n + wide])
        for name, cells in by_node.items()
        for n in range(0, len(cells), wide)
    ]
    values = [cell.value for _, row in rows for cell in row if cell.value is not None]
    low, high = (ranks_map.median + sign * ranks_map.distance for sign in (-1, 1))
    blank = _Cell(None, "", ["", "", ""])
    padded = [[*row, *[blank] * (wide - len(row))] for _, row in rows]  # plotly wants equal rows
    data = {
        "type": "heatmap", "colorscale": _AROUND_MEDIAN, "xgap": 2, "ygap": 2,
        "zmin": unit.scaled(low), "zmax": unit.scaled(high),
        "z": [[cell.value for cell in row] for row in padded],
        "text": [[cell.label for cell in row] for row in padded], "texttemplate": "%{text}",
        "customdata": [[cell.hover for cell in row] for row in padded],
        "colorbar": _colour_bar(unit.symbol),
        "hovertemplate": "%{customdata[1]}<br>" + mapped.label + " %{z:.4g} " + unit.symbol
        + "<br>%{customdata[2]}<extra></extra>",
    }  # fmt: skip
    names = [escape(name) for name, _ in rows] if len(by_node) > 1 else []
    framed = f"; framed: {ranks_map.blame}" if ranks_map.blame else ""
    subject, row_height = "ranks", min(26, max(14, 900 // max(1, len(rows))))
    if run.fleet is not None:
        subject, row_height = f"{len(run.fleet.nodes):,} nodes, the worst rank of each", 14
    return plotly_figure(
        [data],
        f"All {subject}: {mapped.title}" + ("" if values else ": n/a") + framed,
        136 + max(60, row_height * len(rows)),
        xaxis={"visible": False},
        yaxis={
            **titled_axis(""), "autorange": "reversed", "visible": bool(names), "showgrid": False,
            "tickvals": list(range(len(names))), "ticktext": names,
        },
        shapes=[
            {
                "type": "rect", "x0": x - 0.5, "x1": x + 0.5, "y0": y - 0.5, "y1": y + 0.5,
                "line": {"color": "#c62828", "width": 3},
            }
            for y, (_, row) in enumerate(rows) for x, cell in enumerate(row) if cell.is_blamed
        ],
    )  # fmt: skip


_AROUND_MEDIAN = [[0, "#6aaedd"], [0.5, "#e4e8ec"], [1, "#e08a1e"]]
"""Black is legible on each."""


class _Cell(NamedTuple):
    value: float | None
    label: str
    hover: list[str]
    is_blamed: bool = False


def _drawn_cell(cell: rank_map.Cell, unit: Unit) -> _Cell:
    """A cell of the map as the page draws it."""
    subject, label = cell.subject, ""
    if isinstance(subject, FleetNode):
        hover = _node_hover_texts(subject)
    else:
        label, hover = str(subject.rank), _rank_hover_texts(subject)
    return _Cell(_round_digits(unit.scaled(cell.value)), label, hover, cell.is_blamed)


def _round_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _node_hover_texts(node: FleetNode) -> list[str]:
    state = f"{node.up} of {node.ranks} ranks up" + (f", {node.failed} failed" if node.failed else "")
    if node.silent_seconds:
        state = text.silent_for(node.silent_seconds)
    facts = _step_and_exposed(node.step_seconds, node.exposed_ratio)
    return [f"node/{node.node}", f"{node.node}: {state}", facts]


def _rank_hover_texts(rank: RankSnapshot) -> list[str]:
    facts = _step_and_exposed(mean_step_seconds(rank), rank.communication.exposed_ratio)
    return [str(rank.rank), f"rank {rank.rank} on {rank.node}, {text.state_text(rank)}", facts]


def _step_and_exposed(seconds: float | None, ratio: float | None) -> str:
    return f"step {human_seconds(seconds)}, exposed {human_ratio(ratio)}"


# ---- the collectives of the last steps as a figure ----------------------------------------------

_MAX_ROWS = 60
"""With more lanes, the units of a rank are not drawn apart."""
_MAX_ARROWS = 12
_MIN_LATE_NS = 100_000
_HIDDEN = "#9cc3dd"
_TONES = (*(phase for phase in PARTS if phase != "exposed"), "hidden", "exposed")
"""The last one lies over the others."""


@dataclass(frozen=True, slots=True)
class _Row:
    rank: int
    label: str
    spans: Sequence[LaneSpan]
    blocked: Sequence[LaneSpan] = ()
    """The collectives whose exposed part lies over the phases."""


def lanes_figure(lanes: Lanes) -> dict[str, Any]:
    """Phases and collectives at their true moments, milliseconds since the first shown step began."""
    ranks = sorted({step.rank for step in lanes.steps})
    units = {rank: text.by_unit(text.communication_of(lanes, rank)) for rank in ranks}
    has_unit_rows = sum(1 + len(unit_rows) for unit_rows in units.values()) <= _MAX_ROWS
    rows: list[_Row] = []
    for rank in ranks:
        spans = text.communication_of(lanes, rank)
        phases = text.compute_of(lanes, rank)
        phases += tuple(_own_code_spans([s for s in lanes.steps if s.rank == rank], phases))
        rows.append(_Row(rank, f"rank {rank}", phases, spans))
        if has_unit_rows:
            rows += [_Row(rank, unit.label, unit.spans) for unit in units[rank]]
        else:
            rows.append(_Row(rank, "communication", spans))
    begins_ms: dict[int, float] = {}  # where the first rank begins each step
    for step in lanes.steps:
        begin_ms = (step.begin_ns - lanes.zero_ns) / 1e6
        begins_ms[step.step] = min(begin_ms, begins_ms.get(step.step, begin_ms))
    data = [bar for tone in _TONES if (bar := _tone_bars(lanes, rows, tone)) is not None]
    return plotly_figure(
        data, "", max(200, 100 + 22 * len(rows)), barmode="overlay", hovermode="closest",
        showlegend=False,
        uirevision=str(lanes.zero_ns),  # a zoom is into these steps
        xaxis={**titled_axis("ms"), "tickangle": 0},
        yaxis={
            **titled_axis(""), "tickvals": list(range(len(rows))),
            "ticktext": [escape(row.label) for row in rows], "range": [len(rows) - 0.5, -0.5],
            "fixedrange": True,  # else a zoomed part does not show of which rank it is
        },
        shapes=[drawn_line(INK, "dot", (x, x), (0, 1), yref="paper") for x in begins_ms.values()],
        annotations=[
            *(drawn_label(INK, str(step), x=x, y=1, yref="paper") for step, x in begins_ms.items()),
            *_late_arrival_arrows(lanes, rows),
        ],
    )  # fmt: skip


def _own_code_spans(steps: Iterable[LaneStep], phases: Sequence[LaneSpan]) -> Iterator[LaneSpan]:
    """Yields what is in none of the *phases* of *steps* of one rank: the script's own code."""
    for step in steps:
        at_ns = step.begin_ns
        edges = sorted((s.begin_ns, s.end_ns) for s in phases if s.step == step.step)
        for begin_ns, end_ns in (*edges, (step.end_ns, step.end_ns)):
            if begin_ns > at_ns:
                yield LaneSpan(
                    rank=step.rank, step=step.step, stream=Stream.COMPUTE, name=PART_NAMES["other"],
                    begin_ns=at_ns, end_ns=begin_ns, unit="", group="", exposed_ns=0, nbytes=0,
                    on_device=False,
                )  # fmt: skip
            at_ns = max(at_ns, end_ns)


def _tone_bars(lanes: Lanes, rows: Iterable[_Row], tone: str) -> dict[str, Any] | None:
    """The spans of one colour; None without any."""
    bars = [
        (lane, begin_ns, end_ns, span)
        for lane, row in enumerate(rows)
        for span in (*row.spans, *(row.blocked if tone == "exposed" else ()))
        for begin_ns, end_ns in _span_tone_ranges(span, tone)
    ]
    if not bars:
        return None
    return {
        "type": "bar", "orientation": "h", "name": PART_NAMES[tone],
        "y": [lane for lane, *_ in bars], "width": 0.8,
        "base": [(begin_ns - lanes.zero_ns) / 1e6 for _, begin_ns, _, _ in bars],
        "x": [(end_ns - begin_ns) / 1e6 for _, begin_ns, end_ns, _ in bars],
        "customdata": [_span_hover_text(lanes, span) for *_, span in bars],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": PHASE_COLOURS.get(tone, _HIDDEN), "line": {"width": 0}},
    }  # fmt: skip


def _span_tone_ranges(span: LaneSpan, tone: str) -> list[tuple[int, int]]:
    """The ranges of a span in *tone*: a phase, or the hidden or exposed part of a collective."""
    if span.stream is Stream.COMPUTE:
        phase = span.name if span.name in PHASE_COLOURS else "other"
        return [(span.begin_ns, span.end_ns)] if tone == phase else []
    blocked, end_ns = text.exposed_part(span)
    bounds = {"hidden": (span.begin_ns, blocked), "exposed": (blocked, end_ns)}.get(tone)
    return [bounds] if bounds is not None and bounds[1] > bounds[0] else []


def _span_hover_text(lanes: Lanes, span: LaneSpan) -> str:
    late = text.arrival_of(lanes, span) if span.stream is not Stream.COMPUTE else None
    rows = [text.span_text(span), *([text.arrival_text(late)] if late is not None else [])]
    return "<br>".join(map(escape, rows))


def _late_arrival_arrows(lanes: Lanes, rows: Sequence[_Row]) -> list[dict[str, Any]]:
    """From the first rank of a collective to the last one, where the difference is largest."""
    late = [a for a in lanes.arrivals if a.at_ns - a.first_ns >= _MIN_LATE_NS]
    late.sort(key=lambda arrival: arrival.first_ns - arrival.at_ns)
    arrows = []
    for arrival in late[:_MAX_ARROWS]:
        tail = _lane_number(rows, arrival, arrival.first_rank)
        head = _lane_number(rows, arrival, arrival.rank)
        if tail is not None and head is not None:
            arrows.append(
                {
                    "x": (arrival.at_ns - lanes.zero_ns) / 1e6, "y": head,
                    "ax": (arrival.first_ns - lanes.zero_ns) / 1e6, "ay": tail,
                    "xref": "x", "yref": "y", "axref": "x", "ayref": "y", "text": "",
                    "showarrow": True, "arrowhead": 2, "arrowwidth": 1.2, "arrowcolor": INK,
                }
            )  # fmt: skip
    return arrows


def _lane_number(rows: Sequence[_Row], arrival: LateArrival, rank: int) -> int | None:
    """The lane of a rank on which the collective is."""
    for lane, row in enumerate(rows):
        if row.rank == rank and any(
            span.unit == arrival.unit and span.name == arrival.name for span in row.spans
        ):
            return lane
    return None
