"""The page "Communication": what a rank waits for, what is in flight, traces, bandwidth. Pure."""

from typing import Any

import dash_mantine_components as dmc
from dash import html

from zeromon.base.units import human_bytes, human_seconds
from zeromon.readout.dimensions import pipeline_lines
from zeromon.readout.tables import TRAFFIC_COLUMNS, pick_columns
from zeromon.readout.text import group_of, in_graphs
from zeromon.readout.verdict import hang_text
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon_dashboard import plotly_figures
from zeromon_dashboard.charts import empty_figure
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import (
    data_grid,
    graph_panel,
    grid_cells,
    grid_columns,
    section_heading,
    two_columns,
)

_MAX_TRAFFIC_ROWS = 200
_NO_OWN_TIME = "Own time: needs two ranks that have timed the same steps"

_TRAFFIC = pick_columns(
    TRAFFIC_COLUMNS, "unit", "op", "phase", "group", "exposed", "waits", "time", "calls", "bytes",
    "busbw", "best",
)  # fmt: skip


def content(view: Known) -> Page:
    """The table of one rank's collectives, those in flight, and their figures."""
    rank = view.rank
    own_time = plotly_figures.own_time_figure(view.run, view.series, view.where.steps)
    can_capture = view.live and not view.run.ended and not view.run.origin
    busbw = plotly_figures.bandwidth_figure(rank) if rank else None
    sizes = plotly_figures.sizes_figure(rank) if rank else None
    return Page(
        {
            "traffic": {"rowData": traffic_table_rows(rank)},
            "traffic-title": {"children": traffic_table_title(rank)},
            "pipeline": {
                "children": [dmc.Text(sentence, size="sm") for sentence in pipeline_lines(view.run)]
            },
            "in-flight": {"children": _in_flight_items(view.run)},
            "own-time": {"figure": own_time or empty_figure(_NO_OWN_TIME)},
            "busbw": {
                "figure": busbw
                or empty_figure("Bus bandwidth: no collective whose begin and end are known")
            },
            "sizes": {"figure": sizes or empty_figure("Sizes: no collective has been counted yet")},
            "capture": {"style": {} if can_capture else {"display": "none"}},
            "capture-state": {"children": _capture_state_text(view.run)},
        }
    )


def traffic_table_title(rank: RankSnapshot | None) -> str:
    """The title of the table of collectives."""
    if rank is None:
        return "no rank yet"
    untimed = in_graphs(rank)
    return f"Collectives of rank {rank.rank}, per step" + (f"; {untimed}" if untimed else "")


def skeleton(props: Parts, _: Route) -> list[Any]:
    """The components that the content goes into."""
    in_flight = [section_heading("In flight"), dmc.Stack(id="in-flight", gap=4, **props["in-flight"])]
    capture = [
        dmc.Button("Capture a trace of 2 steps", id="capture", **props["capture"]),
        dmc.Text(id="capture-state", size="sm", **props["capture-state"]),
    ]
    result = dmc.Text(id="capture-result", size="sm", c="orange")
    trace = [section_heading("Trace"), dmc.Group(capture, gap="sm"), result]
    return [
        dmc.Title(id="traffic-title", order=2, size="h5", **props["traffic-title"]),
        data_grid(
            "traffic",
            grid_columns(_TRAFFIC, sort_by="exposed"),
            props["traffic"],
            360,
            "no collective of a rank has been counted yet",
        ),
        dmc.Stack(id="pipeline", gap=4, **props["pipeline"]),
        two_columns(html.Div(in_flight), html.Div(trace)),
        graph_panel("own-time", props),
        two_columns(graph_panel("busbw", props), graph_panel("sizes", props)),
    ]


def traffic_table_rows(rank: RankSnapshot | None) -> list[dict[str, Any]]:
    """The rows of the table of collectives, those with the most exposed time first."""
    traffic = rank.communication.traffic[:_MAX_TRAFFIC_ROWS] if rank else ()
    return [{"id": str(number), **grid_cells(_TRAFFIC, row)} for number, row in enumerate(traffic)]


def _in_flight_items(run: RunSnapshot) -> list[Any]:
    taken_ns = run.taken_ns
    waiting = [
        (taken_ns - collective.issued_ns, rank.rank, collective, group_of(rank, collective))
        for rank in run.ranks
        for collective in rank.communication.in_flight
    ]
    # Without a key, equal times of one rank would compare collectives, which have no order
    waiting.sort(key=lambda item: item[:2], reverse=True)
    verb = "hung" if run.ended else "hangs"
    alerts: list[Any] = [
        dmc.Alert(hang_text(run, hang), color="red", title=f"A collective {verb}") for hang in run.hangs
    ]
    if not waiting or run.ended:
        return alerts or [dmc.Text("No collective is in flight.", c="dimmed", size="sm")]
    return alerts + [
        dmc.Text(
            f"rank {rank}: {collective.op} {human_bytes(collective.nbytes)} in {group}"
            f"{f', {collective.unit}' if collective.unit else ''}, for {human_seconds(ns / 1e9)}",
            size="sm",
        )
        for ns, rank, collective, group in waiting[:8]
    ]


def _capture_state_text(run: RunSnapshot) -> str:
    capture = run.capture
    if capture is None:
        return "No trace was taken of this run."
    summary = f"trace {capture.number}, step {capture.first} to {capture.first + capture.steps - 1}"
    folder = f", in {capture.folder}" if capture.files else ""
    return f"{summary}: {capture.state}{folder}{f' ({capture.note})' if capture.note else ''}"
