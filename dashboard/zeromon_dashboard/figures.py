"""Figures for files: the memory plan and the timeline of a trace. Pure."""

from typing import Any

import plotly.graph_objects as go

from zeromon.units import human_seconds
from zeromon_dashboard.charts import COLOURS, GIB, MIB


def _named(row: dict[str, Any]) -> str:
    """The strategy, with the seconds of its step where they are known."""
    if row.get("step_seconds") is None:
        return str(row["label"])
    least, most = map(human_seconds, row["step_seconds_interval"])
    return f"{row['label']}<br>step {human_seconds(row['step_seconds'])} ({least} to {most})"


def plan(content: dict[str, Any]) -> go.Figure:
    """The output of ``zeromon plan --json``: a bar for each strategy, roles stacked, and the limit."""
    rows = content["rows"]
    roles = dict.fromkeys(role for row in rows for role in row["roles"]["device"])
    figure = go.Figure(
        [
            go.Bar(
                name=role.replace("_", " "),
                x=[_named(row) for row in rows],
                y=[row["roles"]["device"].get(role, 0) / GIB for row in rows],
                hovertemplate="%{y:.2f} GiB<extra>%{fullData.name}</extra>",
            )
            for role in roles
        ]
    )
    usable = content["usable_bytes"] / GIB
    figure.add_hline(y=usable, line_dash="dash", annotation_text=f"usable: {usable:.1f} GiB")
    title = f"{content['model']}: peak memory of one of {content['ranks']} devices"
    figure.update_layout(
        barmode="stack", template="plotly_white", colorway=COLOURS, title=title,
        yaxis_title="GiB", legend_title="role",
    )  # fmt: skip
    return figure


def _scale(nbytes: float) -> tuple[int, str]:
    """The unit for sizes up to *nbytes*."""
    return (GIB, "GiB") if nbytes >= GIB else (MIB, "MiB")


def whatif(content: dict[str, Any]) -> go.Figure:
    """The output of ``zeromon whatif --json``: device memory against milliseconds a sample."""
    known = [p for p in content["points"] if p.get("step_seconds") is not None]
    size, unit = _scale(max((p["bytes"]["device"] for p in known), default=0))
    figure = go.Figure()
    best = sorted((p for p in known if p["pareto"]), key=lambda p: p["bytes"]["device"])
    for name, points, mode in (("points", known, "markers"), ("best", best, "lines+markers")):
        figure.add_scatter(
            name=name,
            mode=mode,
            x=[p["bytes"]["device"] / size for p in points],
            y=[1e3 * p["step_seconds"] / p["samples"] for p in points],
            text=[
                " ".join(f"{k}={v}" for k, v in p["change"].items()) or "as it is" for p in points
            ],
            hovertemplate="%{text}<br>%{x:.2f} " + unit + ", %{y:.2f} ms<extra></extra>",
        )
    if content["usable_bytes"] is not None:
        usable = content["usable_bytes"] / size
        figure.add_vline(
            x=usable, line_dash="dash", annotation_text=f"usable: {usable:,.1f} {unit}"
        )
    title = f"{content['model']}: memory of one of {content['devices']} devices against time"
    figure.update_layout(
        template="plotly_white", colorway=COLOURS, title=title,
        xaxis_title=unit, yaxis_title="ms a sample",
    )  # fmt: skip
    return figure


_LANE_COLOURS = {
    "compute": "#0072B2", "communication": "#E69F00", "exposed": "#D55E00", "copy": "#009E73",
}  # fmt: skip


Lane = tuple[float, list[tuple[float, float]]]
"""The covered share, and (start, end) in seconds; see :func:`zeromon.traces.analysis.lanes`."""


def timeline(ranks: list[tuple[str, dict[str, Lane]]]) -> go.Figure:
    """A lane for each rank and kind of activity, with its share of the time. Milliseconds."""
    figure = go.Figure()
    shown: set[str] = set()
    for rank, lanes in ranks:
        for kind, (share, spans) in lanes.items():
            figure.add_bar(
                base=[1e3 * start for start, _ in spans],
                x=[1e3 * (end - start) for start, end in spans],
                y=[f"{rank} {kind} {share:.1%}"] * len(spans),
                orientation="h",
                name=kind,
                legendgroup=kind,
                showlegend=kind not in shown,
                marker={"color": _LANE_COLOURS[kind], "line_width": 0},
                hovertemplate="%{base:.3f} ms, %{x:.3f} ms long<extra>" + kind + "</extra>",
            )
            shown.add(kind)
    figure.update_layout(
        template="plotly_white", barmode="overlay", bargap=0.15, xaxis_title="ms",
        title="Activity of the devices", yaxis={"autorange": "reversed"},
        height=max(360, 60 + 44 * 4 * len(ranks)),
    )  # fmt: skip
    return figure


def page(figure: go.Figure) -> str:
    """*figure* as an HTML page that needs no network."""
    return str(figure.to_html(include_plotlyjs=True))
