"""The page "Timeline": the collectives of the last steps at their true moments. Pure."""

from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.readout.text import gaps_in, lanes_summary
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.step import Lanes
from zeromon_dashboard import plotly_figures
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import LANE_STEPS, Route
from zeromon_dashboard.widgets import CONFIG


def content(_: Known) -> Page:
    """Nothing that changes by itself: the rings are read when it is asked for."""
    return Page({})


def skeleton(_: Parts, route: Route) -> list[Any]:
    """The number of steps, and the place for their lanes."""
    choices = [*map(str, sorted(LANE_STEPS))]
    return [
        dmc.Group(
            [
                dmc.Text("last steps", size="sm"),
                dmc.SegmentedControl(id="lane-steps", data=choices, value=str(route.lanes), size="sm"),
                dmc.Button("read again", id="read-lanes", size="sm"),
                html.A(
                    "trace for Perfetto",
                    id="perfetto",
                    className="plain",
                    download="",
                    href=f"/trace/{route.run}.json.gz",
                    title="every step of the record, and the events that the rings still have",
                ),
            ]
        ),
        dcc.Loading(html.Div(id="lanes"), delay_show=300, type="dot"),
    ]


def timeline_view(lanes: Lanes, run: RunSnapshot) -> list[Any]:
    """The lanes of *run*, and what they do not show."""
    missing = [dmc.Text(gap, size="xs", c="dimmed") for gap in gaps_in(lanes, run)]
    if not lanes.steps:
        return [dmc.Text("No ring of this run is on this node: no step can be shown."), *missing]
    lanes_plot = plotly_figures.lanes_figure(lanes)
    chart = dcc.Graph(id="lanes-chart", figure=lanes_plot, config=CONFIG)
    # Not plotly's legend, which covers the axis on a narrow screen
    legend_items = [
        html.Span([html.I(style={"backgroundColor": bars["marker"]["color"]}), bars["name"]])
        for bars in lanes_plot["data"]
    ]
    summary = lanes_summary(lanes).capitalize()
    return [dmc.Text(summary, fw=600), chart, html.P(legend_items, className="key"), *missing]
