"""Charts of the study as SVG, drawn by plotly in a headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COLOURS = ("#1f5fa8", "#c2571a", "#3b7d3a", "#7a4a9e")
WIDTH, HEIGHT = 360, 270
"""A chart is legible at its own width, so also on a phone."""


@dataclass(frozen=True)
class Series:
    """One line, group of bars or set of points."""

    name: str
    xs: Sequence[Any]
    ys: Sequence[float | None]
    style: str = "line"
    """``line``, ``dotted``, ``bar`` or ``mark``."""
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """A chart with its axes and series."""

    x_title: str
    y_title: str
    series: Sequence[Series]
    x_log: bool = False
    x_ticks: Sequence[float] = field(default=())
    height: int = HEIGHT

    def figure(self) -> dict[str, Any]:
        """Returns the chart as plotly's JSON."""
        font = {"family": "Helvetica, Arial, sans-serif", "size": 11, "color": "#1b1b1b"}
        grid = {"gridcolor": "#d8d8d8", "linecolor": "#555555", "ticks": "outside", "automargin": True}
        x_axis = {**grid, "title": {"text": self.x_title}, "type": "log" if self.x_log else "-"}
        y_axis = {**grid, "title": {"text": self.y_title}, "rangemode": "tozero"}
        if self.x_ticks:
            x_axis |= {"tickvals": list(self.x_ticks), "ticktext": [f"{x:g}" for x in self.x_ticks]}
        is_bars = any(one.style == "bar" for one in self.series)
        if is_bars:
            x_axis, y_axis = (
                {**y_axis, "title": {"text": self.x_title}},
                {**grid, "autorange": "reversed"},
            )
        layout = {
            "width": WIDTH, "height": self.height, "font": font, "barmode": "group",
            "paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff", "xaxis": x_axis, "yaxis": y_axis,
            "margin": {"l": 8, "r": 10, "t": 8, "b": 8},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        }  # fmt: skip
        return {"data": [draw_series(one) for one in self.series], "layout": layout}


def draw_series(series: Series) -> dict[str, Any]:
    """Returns a trace of plotly."""
    colour = COLOURS[series.colour % len(COLOURS)]
    trace: dict[str, Any] = {"name": series.name, "x": list(series.xs), "y": list(series.ys)}
    if series.style == "bar":
        trace |= {"type": "bar", "orientation": "h", "marker": {"color": colour}}
        trace["x"], trace["y"] = trace["y"], trace["x"]
        return trace
    if series.style == "mark":
        marker = {"symbol": "x", "size": 10, "color": colour}
        return trace | {"type": "scatter", "mode": "markers", "marker": marker}
    dash = "dot" if series.style == "dotted" else "solid"
    line = {"color": colour, "dash": dash, "width": 2}
    return trace | {"type": "scatter", "mode": "lines+markers", "line": line}


def write_charts(charts: dict[Path, Chart]) -> None:
    """Writes each chart as SVG to its path."""
    import plotly.offline
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"],
        )
        page = browser.new_page()
        page.set_content("<html><body></body></html>")
        page.add_script_tag(content=plotly.offline.get_plotlyjs())
        for path, chart in charts.items():
            size = json.dumps({"format": "svg", "width": WIDTH, "height": chart.height})
            drawn = page.evaluate(f"Plotly.toImage({json.dumps(chart.figure())}, {size})")
            image = unquote(drawn.partition(",")[2])
            # plotly draws a number for each chart: a diff would show every line
            names = set(re.findall(r"\bdefs-(\w{6})\b", image))
            for number, name in enumerate(sorted(names)):
                image = image.replace(name, f"{path.stem}{number}")
            path.write_text(image + "\n")
        browser.close()
