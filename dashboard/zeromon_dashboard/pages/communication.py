"""The page "Communication": what a rank waits for, what is in flight, traces, bandwidth. Pure."""

from typing import Any

import dash_mantine_components as dmc
from dash import html

from zeromon.readout.dimensions import pipeline_lines
from zeromon.readout.figures import TRAFFIC
from zeromon.readout.hang import hang_text
from zeromon.readout.text import group_of, in_graphs
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.units import human_bytes, human_seconds
from zeromon_dashboard import figures
from zeromon_dashboard.charts import nothing
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import field_columns, field_rows, graph, grid, heading, two_columns

_MOST_TRAFFIC = 200
_NO_OWN_TIME = "Own time: needs two ranks that have timed the same steps"

_TRAFFIC = (
    "unit",
    "op",
    "phase",
    "group",
    "calls",
    "bytes",
    "time",
    "waits",
    "exposed",
    "busbw",
    "best",
)


def content(known: Known) -> Page:
    """The table of one rank's collectives, those in flight, and their figures."""
    rank = known.rank
    own_time = figures.own_time(known.run, known.series, known.where.steps)
    busbw = figures.busbw(rank) if rank else None
    sizes = figures.sizes(rank) if rank else None
    return Page(
        {
            "traffic": {"rowData": stats_rows(rank)},
            "traffic-title": {"children": traffic_title(rank)},
            "pipeline": {
                "children": [dmc.Text(one, size="sm") for one in pipeline_lines(known.run)]
            },
            "in-flight": {"children": _in_flight(known.run)},
            "own-time": {"figure": own_time or nothing(_NO_OWN_TIME)},
            "busbw": {"figure": busbw or nothing("Bus bandwidth: no transfer is timed yet")},
            "sizes": {"figure": sizes or nothing("Sizes: no collective has been counted yet")},
            "capture-state": {"children": _capture(known.run)},
        }
    )


def traffic_title(rank: RankSnapshot | None) -> str:
    """The title of the table of collectives."""
    if rank is None:
        return "no rank yet"
    untimed = in_graphs(rank)
    return f"Collectives of rank {rank.rank}, per step" + (f"; {untimed}" if untimed else "")


def skeleton(parts: Parts, _: Route) -> list[Any]:
    """The components that the content goes into."""
    return [
        dmc.Title(id="traffic-title", order=2, size="h5", **parts["traffic-title"]),
        grid(
            "traffic",
            field_columns(TRAFFIC, *_TRAFFIC, down="exposed"),
            parts["traffic"],
            360,
            "no collective of a rank has been counted yet",
        ),
        dmc.Stack(id="pipeline", gap=4, **parts["pipeline"]),
        two_columns(
            html.Div(
                [heading("In flight"), dmc.Stack(id="in-flight", gap=4, **parts["in-flight"])]
            ),
            html.Div(
                [
                    heading("Trace"),
                    dmc.Group(
                        [
                            dmc.Button("Capture a trace of 2 steps", id="capture"),
                            dmc.Text(id="capture-state", size="sm", **parts["capture-state"]),
                        ],
                        gap="sm",
                    ),
                    dmc.Text(id="capture-result", size="sm", c="orange"),
                ]
            ),
        ),
        graph("own-time", parts),
        two_columns(graph("busbw", parts), graph("sizes", parts)),
    ]


def stats_rows(rank: RankSnapshot | None) -> list[dict[str, Any]]:
    """The rows of the table of collectives, those with the most exposed time first."""
    return field_rows(rank.traffic[:_MOST_TRAFFIC] if rank else (), TRAFFIC, *_TRAFFIC)


def _in_flight(run: RunSnapshot) -> list[Any]:
    now = run.taken_ns
    waiting = [
        (now - one.issued_ns, rank.rank, one, group_of(rank, one))
        for rank in run.ranks
        for one in rank.in_flight
    ]
    waiting.sort(key=lambda item: item[:2], reverse=True)
    lines: list[Any] = [
        dmc.Alert(hang_text(run, hang), color="red", title="A collective hangs")
        for hang in run.hangs
    ]
    if not waiting or run.ended:
        return lines or [dmc.Text("No collective is in flight.", c="dimmed", size="sm")]
    return lines + [
        dmc.Text(
            f"rank {rank}: {one.op} {human_bytes(one.nbytes)} in {group}"
            f"{f', {one.unit}' if one.unit else ''}, for {human_seconds(ns / 1e9)}",
            size="sm",
        )
        for ns, rank, one, group in waiting[:8]
    ]


def _capture(run: RunSnapshot) -> str:
    capture = run.capture
    if capture is None:
        return "No trace was taken of this run."
    what = f"trace {capture.number}, step {capture.first} to {capture.first + capture.steps - 1}"
    place = f", in {capture.folder}" if capture.files else ""
    return f"{what}: {capture.state}{place}{f' ({capture.note})' if capture.note else ''}"
