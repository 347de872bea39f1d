"""The list of all runs, and runs side by side. Pure."""

from collections.abc import Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.comparison.comparison import Column as RunColumn, Comparison, Row, letter
from zeromon.comparison.text import NOT_COMPARABLE, format_change, format_figure, grouped, steps_text
from zeromon.readout.figures import BYTES, COUNT, RATIO, SECONDS
from zeromon.readout.tables import Column, Columns
from zeromon.readout.text import clock, rough_time
from zeromon.readout.verdict import SIGNS
from zeromon.snapshot import Severity
from zeromon.storage.run_store import ListedRun, Manifest
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import configuration_table, data_grid, grid_cells, grid_columns

_RUNS: Columns[ListedRun] = (
    Column("verdict", lambda i: _verdict_text(i), width=10),
    Column("link", lambda i: f"[{i.manifest.run}](/run/{i.manifest.run}/overview)", width=25),
    Column("why", lambda i: i.manifest.cause or i.watched_verdict, width=60),
    Column("step", lambda i: i.manifest.step_seconds, SECONDS),
    Column("exposed", lambda i: i.manifest.exposed_ratio, RATIO),
    Column("memory", lambda i: n if (n := i.manifest.memory_bytes) >= 0 else None, BYTES),
    Column("steps", lambda i: i.manifest.steps, COUNT),
    Column("ranks", lambda i: i.manifest.ranks, COUNT),
    Column(
        "started",
        lambda i: clock(i.manifest.started_wall) if i.manifest.started_wall else "n/a",
        width=18,
    ),
    Column("duration", lambda i: _duration_text(i.manifest), width=8),
    Column("strategy", lambda i: i.manifest.strategy),
    Column("tags", lambda i: ", ".join(i.about.tags)),
    Column("note", lambda i: i.about.note),
    Column("command", lambda i: " ".join(i.manifest.command), width=30),
)


def _verdict_text(item: ListedRun) -> str:
    manifest = item.manifest
    if not item.live and not manifest.ended:
        return f"{SIGNS[Severity.INFO]} not watched"
    sign = _SIGNS.get(manifest.severity, SIGNS[Severity.INFO])
    return f"{sign} {manifest.health or manifest.verdict}"


_SIGNS = {str(severity or ""): sign for severity, sign in SIGNS.items()}


def _duration_text(manifest: Manifest) -> str:
    seconds = manifest.taken_wall - manifest.started_wall
    return rough_time(seconds) if manifest.started_wall and seconds >= 0 else "n/a"


_SPECIAL: dict[str, dict[str, Any]] = {
    "verdict": {
        "pinned": "left",
        "width": 120,
        "flex": 0,
        "cellClassRules": {
            str(severity): f"params.value.startsWith('{SIGNS[severity]}')"
            for severity in (Severity.WARNING, Severity.CRITICAL)
        },
    },
    "link": {
        "pinned": "left",
        "width": 170,
        "flex": 0,
        "headerName": "run",
        "cellRenderer": "markdown",
        "tooltipField": "run",
        "filterValueGetter": {"function": "params.data.run"},
    },
    "why": {"wrapText": True, "autoHeight": True, "minWidth": 300, "flex": 4},
}
"""Further properties of some columns."""
COLUMNS = [{**definition, **_SPECIAL.get(definition["field"], {})} for definition in grid_columns(_RUNS)]


def runs_page(items: Sequence[ListedRun], comparison: Any = None) -> Any:
    """The table of all runs, and the comparison of the selected ones."""
    if not items:
        return dmc.Alert(
            [
                html.P("No run has been recorded yet. Start one:"),
                html.Pre("zeromon run -- torchrun --nproc-per-node 2 train.py"),
            ],
            title="No runs yet",
            color="blue",
        )
    return dmc.Stack(
        [
            dmc.Group(
                [
                    dmc.Title("Runs", order=1, size="h3"),
                    dmc.Button("Compare selected", id="compare"),
                    dmc.Button("Lay charts over each other", id="lay"),
                ]
            ),
            data_grid(
                "run-table",
                COLUMNS,
                {"rowData": run_table_rows(items)},
                720,
                row_height=64,
                rowSelection={"mode": "multiRow", "enableClickSelection": False},
            ),
            html.Div(comparison, id="comparison"),
        ],
        gap="sm",
    )


def run_table_rows(items: Sequence[ListedRun]) -> list[dict[str, Any]]:
    """The rows of the table of runs."""
    return [
        {"id": item.manifest.run, "run": item.manifest.run, **grid_cells(_RUNS, item)} for item in items
    ]


def comparison_view(compared: Comparison) -> Any:
    """Runs side by side: which one to prefer, and which differences are significant."""
    advice = compared.advice
    heads = [_compared_run_head(number, column) for number, column in enumerate(compared.columns)]
    marks = f"Coloured figures differ significantly from {letter(0)}."
    return dmc.Stack(
        [
            dmc.Alert(
                html.Ul([html.Li(reason) for reason in advice.reasons]),
                title=advice.text[:1].upper() + advice.text[1:],
                color="gray" if advice.take is None else "teal",
            ),
            dcc.Link("Lay their charts over each other", href=_over_each_other(compared)),
            configuration_table(compared),
            dmc.Table(
                [
                    html.Thead(html.Tr([html.Th(""), *heads])),
                    html.Tbody([row for group in grouped(compared) for row in _compared_rows(*group)]),
                ],
                withRowBorders=True,
                highlightOnHover=True,
            ),
            dmc.Text(marks, size="xs", c="dimmed"),
        ],
        gap="sm",
    )


def _over_each_other(compared: Comparison) -> str:
    run, *other_runs = (column.runs[0] for column in compared.columns)
    return Route(run=run, others=tuple(other_runs)).address


def _compared_run_head(number: int, column: RunColumn) -> Any:
    ending = f", {column.ended}" if column.died else ""
    return html.Th(
        [
            dcc.Link(f"{letter(number)}  {column.runs[0]}", href=f"/run/{column.runs[0]}/overview"),
            dmc.Text(
                f"{column.strategy}, {steps_text(column)} steps timed{ending}", size="xs", c="dimmed"
            ),
        ]
    )


def _compared_rows(title: str, rows: Sequence[Row]) -> list[Any]:
    head = html.Tr(html.Th(title, colSpan=1 + len(rows[0].cells))) if rows else None
    table_rows = [
        html.Tr([html.Td(row.label), *(_compared_cell(row, n) for n in range(len(row.cells)))])
        for row in rows
    ]
    return [head, *table_rows] if head is not None else []


def _compared_cell(row: Row, number: int) -> Any:
    cell = row.cells[number]
    if cell.value is None:
        return html.Td(dmc.Text("n/a", size="sm", c="dimmed"), title=cell.why)
    colour = ("teal" if cell.better else "orange") if cell.marked else "dimmed"
    return html.Td(
        [
            html.Span(format_figure(cell.value, row.unit), className="figure"),
            dmc.Text(
                format_change(row, number) + ("?" if cell.doubtful else ""),
                size="xs",
                c=colour,
                span=True,
                ml=8,
                fw=700 if cell.marked else 400,
            ),
        ],
        title=NOT_COMPARABLE if cell.doubtful else None,
    )
