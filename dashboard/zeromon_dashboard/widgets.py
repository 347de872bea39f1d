"""Components that several pages use: cards, charts, tables, findings. Pure."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.base.units import human_ratio
from zeromon.comparison.comparison import Comparison, letter
from zeromon.comparison.text import configured_rows
from zeromon.diagnosis.rule import action_of
from zeromon.readout.answers import findings_by_urgency
from zeromon.readout.figures import INDEX, TEXT
from zeromon.readout.remedy import remedy_text
from zeromon.readout.tables import Column, Columns, Row
from zeromon.readout.text import finding_text, rank_prefix
from zeromon.readout.verdict import risk_text
from zeromon.snapshot import Finding, Pool, RunSnapshot, Severity
from zeromon.snapshot.focus import nearest_oom
from zeromon.snapshot.levels import OOM
from zeromon_dashboard import charts
from zeromon_dashboard.charts import Chart
from zeromon_dashboard.page import Known, Parts, Props

CONFIG = {"displayModeBar": False, "responsive": True}
"""A drag zooms, a double click shows all again: plotly's buttons would cover the last steps."""


SEVERITY_COLOURS = {
    Severity.CRITICAL: "red",
    Severity.WARNING: "orange",
    Severity.INFO: "blue",
    None: "dimmed",
}
"""Colour of a severity; None: below every threshold."""


def figure_card(label: str, value: str, note: str, colour: str = "dimmed") -> Any:
    """A figure: its name, its value, and a note in a colour."""
    return dmc.Paper(
        [
            dmc.Text(label, size="xs", c="dimmed", tt="uppercase", fw=600),
            dmc.Text(value, size="xl", fw=700, className="figure"),
            dmc.Text(note, size="xs", c=colour, lineClamp=3),
        ],
        p="sm",
    )


def risk_card(run: RunSnapshot) -> Any:
    """The highest out-of-memory risk of the run."""
    nearest = nearest_oom(run.ranks)
    if nearest is None:
        reason = "the run has ended" if run.ended else "the capacity is unknown"
        return figure_card("OOM risk", "n/a", reason)
    rank, risk = nearest
    colour = SEVERITY_COLOURS[OOM.severity(risk.ratio)]
    owner = "" if risk.pool == Pool.HOST else rank_prefix(rank.rank)
    return figure_card("OOM risk", human_ratio(risk.ratio), owner + risk_text(risk, rank), colour)


_MAX_CARDS = 12


def card_parts(*contents: Any) -> Parts:
    """A part for each card, so that a tab is sent those that changed; the rest have no content."""
    children = (*contents, *(None for _ in range(_MAX_CARDS - len(contents))))
    return {f"card-{n}": {"children": content} for n, content in enumerate(children)}


def card_row(props: Parts) -> Any:
    """The row of cards at the top of a page."""
    slots = [
        html.Div(id=name, **card_props) for name, card_props in props.items() if name.startswith("card-")
    ]
    return dmc.SimpleGrid(slots, id="cards", cols={"base": 1, "sm": 2, "lg": 4}, spacing="sm")


def graph_panel(name: str, props: Parts) -> Any:
    """A figure in a frame."""
    return dmc.Paper(graph(name, props), p=4)


def graph(name: str, props: Parts) -> Any:
    """A figure."""
    # Else a page jumps when its charts are drawn
    height = props[name]["figure"]["layout"].get("height", 0)
    return html.Div(dcc.Graph(id=name, config=CONFIG, **props[name]), style={"minHeight": height})


def folded(summary: Sequence[Any], *children: Any) -> Any:
    """Components that are shown when their *summary* is clicked."""
    return html.Details([html.Summary(summary), *children], className="folded")


def drawn_charts(view: Known, *names: str) -> dict[str, Chart]:
    """The charts, or those with these *names*; of one without a value its title, and why."""
    steps = view.where.steps
    if view.others:
        by_name = charts.overlaid_charts([(view.run, view.series), *view.others], steps)
    else:
        by_name = charts.charts_of(view.series, view.run, steps)
    return {name: by_name[name] for name in names or by_name}


def two_columns(*components: Any) -> Any:
    """Two columns, or one on a narrow screen."""
    return dmc.SimpleGrid(list(components), cols={"base": 1, "lg": 2}, spacing="sm")


def section_heading(title: str) -> Any:
    """The title of a part of a page."""
    return dmc.Title(title, order=2, size="h5")


GRIDS: Mapping[str, Any] = json.loads(Path(__file__).with_name("grids.json").read_bytes())
"""The properties of tables and columns, as AG Grid names them.

Without those of a column of text, a column of dates has a filter of its own kind.
"""


def data_grid(
    name: str,
    columns: Sequence[dict[str, Any]],
    rows: Props,
    height: int,
    empty: str = "nothing to show",
    row_height: int = 28,
    **options: Any,
) -> Any:
    """A table of *rows*, at most *height* pixels high; *empty*: without rows; *options*: of AG Grid.

    *row_height*: about how high a row is, where text wraps.
    """
    style = {"height": min(height, 98 + row_height * max(2, len(rows["rowData"])))}
    grid = dag.AgGrid(
        id=name,
        columnDefs=list(columns),
        # Without ids, AG Grid builds every row anew each second and drops the user's selection
        getRowId="params.data.id",
        defaultColDef=GRIDS["default_column"],
        dashGridOptions={**GRIDS["options"], "localeText": {"noRowsToShow": empty}, **options},
        style=style,
        **rows,
    )
    return html.Div(grid, style=style)  # else what is below jumps when AG Grid is loaded


def text_column(name: str, title: str, width: int = 0, **options: Any) -> dict[str, Any]:
    """A column of text. *width*: pixels, 0 for a share of the room."""
    column = {
        "field": name,
        "headerName": title,
        "tooltipField": name,
        **GRIDS["text_column"],
        **options,
    }
    if width:
        column |= {"width": width, "flex": 0}
    return column


def number_column(name: str, title: str) -> dict[str, Any]:
    """A column of numbers, "n/a" where one is unknown; files have all their digits."""
    return {
        "field": name,
        "headerName": title,
        **GRIDS["number_column"],
        "minWidth": 30 + round(6.5 * len(title)),
    }


def grid_columns(columns: Columns[Row], sort_by: str = "") -> list[dict[str, Any]]:
    """The definitions of *columns*; rows are sorted by the column *sort_by*, the largest value first."""
    definitions = map(_grid_column, columns)
    return [
        {**definition, "sort": "desc", "minWidth": definition["minWidth"] + 22}  # of its arrow
        if definition["field"] == sort_by
        else definition
        for definition in definitions
    ]


def _grid_column(column: Column[Row]) -> dict[str, Any]:
    if column.unit is INDEX:
        return text_column(column.name, column.name, 60, minWidth=60, filter=False)
    if column.unit is TEXT:
        width = 16 + 7 * max(column.width, len(column.name) + 3)
        return text_column(column.name, column.name, minWidth=width)
    return number_column(column.name, column.heading)


def grid_cells(columns: Columns[Row], row: Row) -> dict[str, Any]:
    """The values of *row* in the units of :func:`grid_columns`; None where unknown."""
    return {column.name: column.scaled(row) for column in columns}


def finding_list(run: RunSnapshot) -> list[Any]:
    """A panel for each finding, the most urgent first; a sentence where there is none."""
    panels = [*map(_finding_panel, findings_by_urgency(run))]
    return panels or [dmc.Text("Nothing to report.", c="dimmed", size="sm")]


def change_list(findings: Sequence[Finding], total: int, judged: Finding | None) -> list[Any]:
    """Panels of what to change: the first of *findings* in full, the others folded.

    The sentence of *judged* is in the verdict already; *total*: all findings of the run.
    """
    panels = [_finding_panel(f, is_judged=f is judged) for f in findings[:1]]
    panels += [folded([f"{f.code} {finding_text(f)}"], _finding_panel(f)) for f in findings[1:]]
    omitted = total - len(findings)
    return [*panels, *([html.P(f"and {omitted} more under Advice", className="dim")] if omitted else [])]


def _finding_panel(finding: Finding, *, is_judged: bool = False) -> Any:
    rows: list[Any] = [
        dmc.Badge(
            finding.code or finding.rule, color=SEVERITY_COLOURS[finding.severity], variant="light"
        ),
        *([] if is_judged else [dmc.Text(finding_text(finding), size="sm", mt=4)]),
    ]
    if finding.remedy is None and (action := action_of(finding)):
        rows.append(dmc.Text(action, size="sm", mt=4, c="inherit" if is_judged else "dimmed"))
    if finding.remedy is not None:
        remedy = remedy_text(finding.remedy)
        diff = [html.Span(d.text + "\n", className=_DIFF_CLASSES.get(d.kind)) for d in remedy.diff]
        added_text = "\n".join(d.text[2:] for d in remedy.diff if d.kind == "added")
        rows += [
            dmc.Text(remedy.reason, size="xs", c="dimmed", mt=4),
            added_text and dcc.Clipboard(content=added_text, title="copy what to add", className="copy"),
            html.Pre(diff, className="diff"),
            dmc.Text(remedy.outlook, size="xs"),
        ]
    return dmc.Paper(rows, p="sm", className=f"finding {finding.severity}")


_DIFF_CLASSES = {"added": "in", "removed": "out"}


def configuration_table(compared: Comparison) -> Any:
    """A table of what the runs do not have alike: configuration, command, environment."""
    rows = configured_rows(compared)
    unknown = [letter(n) for n in compared.environment.unknown]
    remarks = [f"The environment of {', '.join(unknown)} was not recorded."] if unknown else []
    if not rows:
        remarks.append("No difference in configuration and environment is known.")
    heads = [
        html.Th([letter(n), " ", dcc.Link(column.runs[0], href=f"/run/{column.runs[0]}/overview")])
        for n, column in enumerate(compared.columns)
    ]
    table = dmc.Table(
        [
            html.Thead(html.Tr([html.Th("what differs"), *heads])),
            html.Tbody(
                [html.Tr([html.Td(row.name), *(html.Td(v) for v in row.values)]) for row in rows]
            ),
        ],
        className="compared",
    )
    tables = [dmc.TableScrollContainer(table, minWidth=240 * len(heads))] if rows else []
    return html.Div(
        [
            section_heading("Configuration"),
            *tables,
            *(dmc.Text(remark, size="sm", c="dimmed") for remark in remarks),
        ]
    )


def trouble_alert(problem: str, hint: str = "", links: Mapping[str, str] | None = None) -> Any:
    """A page that says why there is nothing to show. *links*: where else to go, label -> address."""
    items = [html.Li(dcc.Link(label, href=address)) for label, address in (links or {}).items()]
    children = [html.P(problem), html.P(hint), *([html.Ul(items)] if items else [])]
    return dmc.Alert(children, title="This cannot be shown", color="red", className="trouble")
