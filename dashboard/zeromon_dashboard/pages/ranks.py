"""The page "Ranks": a map and a table of all ranks, and the stragglers. Pure."""

from typing import Any

import dash_mantine_components as dmc

from zeromon.base.units import human_count
from zeromon.readout.answers import window_text
from zeromon.readout.figures import MAPPED
from zeromon.readout.tables import RANK_COLUMNS
from zeromon.readout.text import straggler_text
from zeromon.readout.verdict import hang_headline
from zeromon.snapshot import RunSnapshot
from zeromon_dashboard import plotly_figures
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import data_grid, graph_panel, grid_cells, grid_columns

_SPECIAL: dict[str, dict[str, Any]] = {"rank": {"pinned": "left"}, "state": {"flex": 3, "minWidth": 160}}
COLUMNS = [{**column, **_SPECIAL.get(column["field"], {})} for column in grid_columns(RANK_COLUMNS)]


def content(view: Known) -> Page:
    """The map and the table of ranks, and the stragglers."""
    return Page(
        {
            "rank-map": {"figure": plotly_figures.rank_map_figure(view.chosen, view.where.metric)},
            "rank-table": {"rowData": rank_table_rows(view.chosen, view.where.node)},
            "rank-count": {"children": _rank_count_text(view)},
            "stragglers": {"children": _straggler_alerts(view.run)},
        }
    )


def skeleton(props: Parts, route: Route) -> list[Any]:
    """The components that the content goes into."""
    return [
        dmc.SegmentedControl(
            id="metric",
            value=route.metric,
            data=[{"value": metric.name, "label": metric.title} for metric in MAPPED],
        ),
        graph_panel("rank-map", props),
        dmc.Stack(id="stragglers", gap="xs", **props["stragglers"]),
        dmc.Text(id="rank-count", size="sm", c="dimmed", **props["rank-count"]),
        data_grid("rank-table", COLUMNS, props["rank-table"], 420, "no rank has reported yet"),
    ]


def _rank_count_text(view: Known) -> str:
    """The window of the figures, and how many of all ranks the table has where it has not all."""
    fleet, node = view.run.fleet, view.where.node
    window = window_text(view.run).capitalize()
    if fleet is None:
        return window
    if node:
        return f"The ranks of {node}. Click a rank to open it. {window}."
    listed, total = human_count(len(view.run.ranks)), human_count(fleet.ranks)
    return (
        f"{listed} of {total} ranks, the most important ones. Click a node to see its ranks. {window}."
    )


def rank_table_rows(run: RunSnapshot, node: str = "") -> list[dict[str, Any]]:
    """The rows of the table of ranks: all, or those of *node*."""
    return [
        {"id": str(rank.rank), **grid_cells(RANK_COLUMNS, rank)}
        for rank in run.ranks
        if not node or rank.node == node
    ]


def _straggler_alerts(run: RunSnapshot) -> list[Any]:
    if run.hangs:
        return [dmc.Alert(hang_headline(run, run.hangs[0]), title="Hang", color="red")]
    if not run.stragglers:
        calm = "No straggler: the ranks wait for no single rank."
        calm = calm if run.ranks else "Stragglers: n/a (no rank has reported)"
        return [dmc.Text(calm, c="dimmed", size="sm")]
    return [
        dmc.Alert(straggler_text(straggler), title="Straggler", color="orange")
        for straggler in run.stragglers
    ]
