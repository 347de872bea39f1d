"""The list of all runs, and runs side by side. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.comparison.comparison import Column as RunColumn, Comparison, Row, letter
from zeromon.comparison.text import (
    NOT_COMPARABLE,
    format_cell,
    format_change,
    format_figure,
    grouped,
    steps_text,
)
from zeromon.readout.figures import BYTES, COUNT, LAST_STEPS, RATIO, SECONDS
from zeromon.readout.tables import Column, Columns
from zeromon.readout.text import clock, rough_time
from zeromon.readout.verdict import SIGNS
from zeromon.snapshot import Severity
from zeromon.storage.run_store import ListedRun, Manifest
from zeromon_dashboard.charts import Chart, difference_chart
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import (
    GRIDS,
    configuration_table,
    data_grid,
    graph_panel,
    grid_cells,
    grid_columns,
    two_columns,
)

_RUNS: Columns[ListedRun] = (
    Column("verdict", lambda i: _verdict_text(i)),
    Column("link", lambda i: f"[{i.manifest.run}](/run/{i.manifest.run}/overview)"),
    Column("why", lambda i: i.manifest.cause.partition("; ")[0] or i.watched_verdict),
    Column("last steps", lambda _: ""),
    Column("step", lambda i: i.manifest.step_seconds, SECONDS),
    Column("exposed", lambda i: i.manifest.exposed_ratio, RATIO),
    Column("memory", lambda i: n if (n := i.manifest.memory_bytes) >= 0 else None, BYTES),
    Column("steps", lambda i: i.manifest.steps, COUNT),
    Column("ranks", lambda i: f"{i.manifest.ranks} {i.manifest.strategy}"),
    Column("started", lambda i: clock(started)[:-3] if (started := i.manifest.started_wall) else "n/a"),
    Column("duration", lambda i: _duration_text(i.manifest)),
    Column("notes", lambda i: ", ".join(filter(None, (*i.about.tags, i.about.note)))),
)


def _verdict_text(item: ListedRun) -> str:
    manifest, neutral_sign = item.manifest, SIGNS[Severity.INFO]
    if not item.live and not manifest.ended:
        return f"{neutral_sign} not watched"
    return f"{_SIGNS.get(manifest.severity, neutral_sign)} {manifest.health or manifest.verdict}"


_SIGNS = {str(severity or ""): sign for severity, sign in SIGNS.items()}


def _duration_text(manifest: Manifest) -> str:
    seconds = manifest.taken_wall - manifest.started_wall
    return rough_time(seconds) if manifest.started_wall and seconds >= 0 else "n/a"


_SEVERE_CELLS = {
    str(severity): f"params.value.startsWith('{SIGNS[severity]}')"
    for severity in (Severity.WARNING, Severity.CRITICAL)
}
# The sum of the widths, in pixels, fits a screen of 1440
COLUMNS = [
    {**definition, "flex": 0, "minWidth": 60, **GRIDS["run_columns"][definition["field"]]}
    for definition in grid_columns(_RUNS)
]
COLUMNS[0]["cellClassRules"] = _SEVERE_CELLS  # of the verdict


def runs_page(items: Sequence[ListedRun]) -> Any:
    """The table of all runs."""
    if not items:
        return dmc.Alert(
            [
                html.P("No run has been recorded yet. Start one:"),
                html.Pre("zeromon run -- torchrun --nproc-per-node 2 train.py"),
            ],
            title="No runs yet",
            color="blue",
        )
    rows = run_table_rows(items)
    return dmc.Stack(
        [
            dmc.Group(
                [
                    dmc.Title("Runs", order=1, size="h3"),
                    dmc.Button("Compare selected", id="compare"),
                    dmc.Button("Lay charts over each other", id="lay"),
                    dmc.Text(
                        f"Step and exposed: {LAST_STEPS}, of the worst rank", size="xs", c="dimmed"
                    ),
                ]
            ),
            data_grid(
                "run-table",
                [c for c in COLUMNS if c["field"] != "notes" or any(row["notes"] for row in rows)],
                {"rowData": rows},
                720,
                row_height=80,
                rowSelection={"mode": "multiRow", "enableClickSelection": False},
            ),
        ],
        gap="sm",
    )


def run_table_rows(items: Sequence[ListedRun]) -> list[dict[str, Any]]:
    """The rows of the table of runs."""
    return [
        {
            "id": item.manifest.run, "run": item.manifest.run, "pace": item.manifest.pace_seconds,
            "command": " ".join(item.manifest.command),
            "cause": item.manifest.cause or item.watched_verdict, **grid_cells(_RUNS, item),
        }
        for item in items
    ]  # fmt: skip


def comparison_view(compared: Comparison, drawn: Mapping[str, Chart]) -> Any:
    """Runs side by side: which one to prefer, which differences are significant, and their charts.

    *drawn*: charts by name, each with a line a run.
    """
    advice = compared.advice
    run, *other_runs = (column.runs[0] for column in compared.columns)
    over_each_other = Route(run=run, others=tuple(other_runs))
    heads = [_compared_run_head(number, column) for number, column in enumerate(compared.columns)]
    marks = f"Coloured figures differ significantly from {letter(0)}."
    if any(cell.doubtful for row in compared.rows for cell in row.cells):
        marks += f" Those with ? are {NOT_COMPARABLE}."
    plots = {name: drawn[name] for name in ("step-time", "memory")}
    for name, chart in list(plots.items()):
        if difference := chart.traces and difference_chart(chart):
            plots[f"{name}-difference"] = difference
    table = dmc.Table(
        [
            html.Thead(html.Tr([html.Th("figure"), *heads])),
            html.Tbody([row for group in grouped(compared) for row in _compared_rows(*group)]),
        ],
        highlightOnHover=True,
    )
    return dmc.Stack(
        [
            dmc.Title("Compare runs", order=1, size="h3"),
            dmc.Alert(
                html.Ul([html.Li(reason) for reason in advice.reasons]),
                title=advice.text[:1].upper() + advice.text[1:],
                color="gray" if advice.take is None else "teal",
            ),
            html.Div(
                [dcc.Link("All runs", href="/"), " · ",
                 dcc.Link("All charts over each other", href=over_each_other.address)]
            ),
            two_columns(
                *(graph_panel(name, {name: {"figure": c.figure()}}) for name, c in plots.items())
            ),
            dmc.TableScrollContainer(table, minWidth=240 * len(heads)),
            dmc.Text(marks, size="xs", c="dimmed"),
            configuration_table(compared),
        ],
        id="comparison",
        gap="sm",
    )  # fmt: skip


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
        title=NOT_COMPARABLE if cell.doubtful else format_cell(row, number),
    )
