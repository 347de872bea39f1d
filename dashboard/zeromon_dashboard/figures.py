"""Predicted changes, and memory by stack, as figures. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from zeromon.traces.allocation_roles import ROLES, UNKNOWN
from zeromon.traces.allocations import Holding
from zeromon.traces.stacks import NO_STACK, frame_text, told
from zeromon.units import byte_scale, human_bytes
from zeromon_dashboard.charts import COLOURS, layout


def whatif(content: dict[str, Any]) -> go.Figure:
    """The output of ``zeromon whatif --json``: device memory against milliseconds a sample."""
    known = [p for p in content["points"] if p.get("step_seconds") is not None]
    most = max((p["bytes"]["device"] for p in known), default=0)
    size, unit = byte_scale(most)
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


_MOST_STACKS = 400
_DEEPEST = 40
_ROLE_COLOURS = {
    role: "rgba({}, {}, {}, 0.45)".format(*bytes.fromhex(colour[1:]))
    for role, colour in zip(ROLES, (*COLOURS[:6], COLOURS[-1]), strict=True)
}
"""So pale that text is legible on them, on a light and on a dark page."""


def flame(title: str, held: Sequence[Holding]) -> dict[str, Any]:
    """Memory by role, then by stack from the outermost frame to the innermost, as an icicle."""
    nodes: dict[tuple[str, ...], int] = defaultdict(int)
    for number, one in enumerate(held):
        frames = [frame_text(frame) for frame in reversed(told(one.stack))][-_DEEPEST:]
        if number >= _MOST_STACKS:
            frames = ["other stacks"]
        path = (one.role, *(frames or [NO_STACK]))
        for depth in range(len(path) + 1):
            nodes[path[:depth]] += one.nbytes
    numbers = {path: str(number) for number, path in enumerate(nodes)}
    icicle = {
        "type": "icicle", "branchvalues": "total", "tiling": {"orientation": "v"},
        "ids": list(numbers.values()),
        "parents": [numbers[path[:-1]] if path else "" for path in nodes],
        "labels": [escape(path[-1]) if path else "all" for path in nodes],
        "values": list(nodes.values()),
        "text": [human_bytes(nbytes) for nbytes in nodes.values()],
        "marker": {"colors": [_ROLE_COLOURS[path[0] if path else UNKNOWN] for path in nodes]},
        "hovertemplate": "%{label}<br>%{text}, %{percentRoot} of all<extra></extra>",
        "textinfo": "label+text", "sort": False,
    }  # fmt: skip
    deep = max((len(path) for path in nodes), default=0)
    return {
        "data": [icicle],
        "layout": {**layout(title, 120 + 28 * deep), "margin": {"t": 48, "l": 8, "r": 8, "b": 8}},
    }
