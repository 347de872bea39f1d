"""The list of all runs, and runs side by side. Pure."""

from collections.abc import Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.compare.comparison import Column, Comparison, Row, letter
from zeromon.compare.text import NOT_COMPARABLE, format_change, format_figure, grouped, steps_text
from zeromon.readout.figures import EXPOSED, MEMORY, STEP
from zeromon.readout.text import clock
from zeromon_dashboard.hub import Item
from zeromon_dashboard.page import round_for_table
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import (
    configuration_table,
    data_grid,
    figure_column,
    number_column,
    text_column,
)

COLUMNS = (
    text_column("run", "run", minWidth=200, pinned="left"),
    text_column("state", "state", minWidth=260),
    text_column("started", "started", minWidth=190, filter="agTextColumnFilter"),
    text_column("strategy", "strategy"),
    number_column("ranks", "ranks"),
    number_column("steps", "steps"),
    *map(figure_column, (STEP, EXPOSED, MEMORY)),
    text_column("worst", "findings"),
    text_column("tags", "tags"),
    text_column("note", "note"),
    text_column("command", "command", minWidth=240),
)


def runs_page(items: Sequence[Item], comparison: Any = None) -> Any:
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
                    dmc.Text("Click a run to open it.", size="sm", c="dimmed"),
                ]
            ),
            data_grid(
                "run-table",
                COLUMNS,
                {"rowData": run_table_rows(items)},
                420,
                rowSelection={"mode": "multiRow", "enableClickSelection": False},
            ),
            html.Div(comparison, id="comparison"),
        ],
        gap="sm",
    )


def run_table_rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The rows of the table of runs."""
    return [
        {
            "id": m.run,
            "run": m.run,
            "state": m.verdict if item.live or m.ended else f"no longer monitored: {m.verdict}",
            "started": clock(m.started_wall) if m.started_wall else "n/a",
            "strategy": m.strategy,
            "ranks": m.ranks,
            "steps": m.steps,
            "step": round_for_table(STEP.unit.scaled(m.step_seconds)),
            "exposed": round_for_table(EXPOSED.unit.scaled(m.exposed_ratio)),
            "memory": round_for_table(
                MEMORY.unit.scaled(m.memory_bytes) if m.memory_bytes >= 0 else None
            ),
            "worst": m.worst or "none",
            "tags": ", ".join(item.about.tags),
            "note": item.about.note,
            "command": " ".join(m.command),
        }
        for item in items
        for m in (item.manifest,)
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


def _compared_run_head(number: int, column: Column) -> Any:
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
