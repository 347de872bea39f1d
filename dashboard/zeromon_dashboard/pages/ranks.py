"""The page "Ranks": a map and a table of all ranks, and the stragglers. Pure."""

from typing import Any

import dash_mantine_components as dmc

from zeromon.readout.figures import EXPOSED, LATE, MAPPED, MEMORY, OVERLAP, RISK, STEP, WAITS
from zeromon.readout.hang import hang_headline
from zeromon.readout.text import state_text, straggler_text
from zeromon.snapshot import RunSnapshot
from zeromon.units import human_count
from zeromon_dashboard import figures
from zeromon_dashboard.page import Known, Page, Parts, rounded
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import column, figure_column, graph, grid, number

COLUMNS = (
    column("rank", "rank", 80, pinned="left", filter="agNumberColumnFilter"),
    column("node", "node"),
    column("device", "device"),
    column("state", "state"),
    number("steps", "steps"),
    *map(figure_column, (STEP, EXPOSED, OVERLAP, MEMORY, RISK, LATE, WAITS)),
    column("unit", "unit"),
)


def content(known: Known) -> Page:
    """The map and the table of ranks, and the stragglers."""
    return Page(
        {
            "rank-map": {"figure": figures.rank_map(known.chosen, known.where.metric)},
            "rank-table": {"rowData": rank_rows(known.chosen, known.where.node)},
            "rank-count": {"children": _count(known)},
            "stragglers": {"children": _stragglers(known.run)},
        }
    )


def skeleton(parts: Parts, where: Route) -> list[Any]:
    """The components that the content goes into."""
    return [
        dmc.SegmentedControl(
            id="metric",
            value=where.metric,
            data=[{"value": figure.name, "label": figure.title} for figure in MAPPED],
        ),
        graph("rank-map", parts),
        dmc.Stack(id="stragglers", gap="xs", **parts["stragglers"]),
        dmc.Text(id="rank-count", size="sm", c="dimmed", **parts["rank-count"]),
        grid("rank-table", COLUMNS, parts["rank-table"], 420, "no rank has reported yet"),
    ]


def _count(known: Known) -> str:
    """How many of all ranks the table has; "" where it has all."""
    fleet, node = known.run.fleet, known.where.node
    if fleet is None:
        return ""
    if node:
        return f"The ranks of {node}. Click a rank to open it."
    shown, total = human_count(len(known.run.ranks)), human_count(fleet.ranks)
    return f"{shown} of {total} ranks, the most important ones. Click a node to see its ranks."


def rank_rows(run: RunSnapshot, node: str = "") -> list[dict[str, Any]]:
    """The rows of the table of ranks: all, or those of *node*."""
    rows: list[dict[str, Any]] = []
    for rank in (rank for rank in run.ranks if not node or rank.node == node):
        figures = {f.name: rounded(f.unit.scaled(f.of_rank(rank))) for f in (*MAPPED, OVERLAP)}
        rows.append(
            {
                "id": str(rank.rank),
                "rank": rank.rank,
                "node": rank.node,
                "device": rank.device,
                "state": state_text(rank),
                "steps": rank.step,
                **figures,
                "unit": rank.unit,
            }
        )
    return rows


def _stragglers(run: RunSnapshot) -> list[Any]:
    if run.hangs:
        return [dmc.Alert(hang_headline(run, run.hangs[0]), title="Hang", color="red")]
    if not run.stragglers:
        return [dmc.Text("No straggler: the ranks wait for no single rank.", c="dimmed", size="sm")]
    return [
        dmc.Alert(straggler_text(one), title="Straggler", color="orange") for one in run.stragglers
    ]
