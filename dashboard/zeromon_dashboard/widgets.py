"""Components that several pages use: cards, charts, tables, findings. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.compare.comparison import Comparison, letter
from zeromon.compare.text import configuration
from zeromon.focus import nearest_oom
from zeromon.levels import OOM
from zeromon.readout.figures import TEXT, Fields, Figure, Row
from zeromon.readout.remedy import DiffLine, remedy_text
from zeromon.readout.text import finding_text, subject
from zeromon.readout.verdict import risk_text
from zeromon.snapshot import Finding, Pool, RunSnapshot, Severity
from zeromon.units import human_ratio
from zeromon_dashboard import charts
from zeromon_dashboard.charts import Chart
from zeromon_dashboard.page import Known, Parts, Props

CONFIG = {
    "displaylogo": False,
    "showSendToCloud": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["lasso2d", "select2d"],
}


SEVERITY_COLOURS = {
    Severity.CRITICAL: "red",
    Severity.WARNING: "orange",
    Severity.INFO: "blue",
    None: "dimmed",
}
"""Colour of a severity; None: below every threshold."""


def card(label: str, value: str, note: str, colour: str = "dimmed") -> Any:
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
        why = "the run has ended" if run.ended else "the capacity is unknown"
        return card("OOM risk", "n/a", why)
    rank, risk = nearest
    colour = SEVERITY_COLOURS[OOM.severity(risk.ratio)]
    whose = "" if risk.pool == Pool.HOST else subject(rank.rank)
    return card("OOM risk", human_ratio(risk.ratio), whose + risk_text(risk, rank), colour)


_MOST_CARDS = 12


def card_parts(*made: Any) -> Parts:
    """A part for each card, so that a tab is sent those that changed; the rest have no content."""
    children = (*made, *(None for _ in range(_MOST_CARDS - len(made))))
    return {f"card-{n}": {"children": one} for n, one in enumerate(children)}


def cards(parts: Parts) -> Any:
    """The row of cards at the top of a page."""
    places = [html.Div(id=name, **own) for name, own in parts.items() if name.startswith("card-")]
    return dmc.SimpleGrid(places, id="cards", cols={"base": 1, "sm": 2, "lg": 4}, spacing="sm")


def graph(name: str, parts: Parts) -> Any:
    """A figure."""
    return dmc.Paper(dcc.Graph(id=name, config=CONFIG, **parts[name]), p=4)


def drawn(known: Known, *names: str) -> dict[str, Chart]:
    """The charts, or those with these *names*; of one without a value its title, and why."""
    steps = known.where.steps
    if known.others:
        made = charts.overlaid([(known.run, known.series), *known.others], steps)
    else:
        made = charts.charts_of(known.series, known.run, steps)
    if steps is not None:
        why = f"no value of step {steps[0]:,} to {steps[1]:,} is known"
    else:
        why = "no step has told it" if known.series["step"] else "no step has ended yet"
    return {
        name: made[name] or charts.without_value(name, known.run, why) for name in names or made
    }


def two_columns(*parts: Any) -> Any:
    """Two columns, or one on a narrow screen."""
    return dmc.SimpleGrid(list(parts), cols={"base": 1, "lg": 2}, spacing="sm")


def heading(text: str) -> Any:
    """The title of a part of a page."""
    return dmc.Title(text, order=2, size="h5")


def grid(
    name: str,
    columns: Sequence[dict[str, Any]],
    rows: Props,
    height: int,
    empty: str = "nothing to show",
    **options: Any,
) -> Any:
    """A table of *rows*, at most *height* pixels high. *empty*: without rows; *options*: of AG Grid."""
    return dag.AgGrid(
        id=name,
        columnDefs=list(columns),
        getRowId="params.data.id",
        defaultColDef={
            "sortable": True,
            "filter": True,
            "floatingFilter": True,
            "resizable": True,
            "suppressHeaderFilterButton": True,
            "minWidth": 100,
            "flex": 1,
            "suppressFloatingFilterButton": True,
        },
        dashGridOptions={
            "theme": {"function": "themeQuartz.withPart(agGrid.colorSchemeVariable)"},
            "rowHeight": 28,
            "headerHeight": 34,
            "floatingFiltersHeight": 32,
            "animateRows": False,
            "tooltipShowDelay": 300,
            "localeText": {"noRowsToShow": empty},
            **options,
        },
        style={"height": min(height, 90 + 28 * max(2, len(rows["rowData"])))},
        **rows,
    )


def column(name: str, title: str, width: int = 0, **more: Any) -> dict[str, Any]:
    """A column of text. *width*: pixels, 0 for a share of the room."""
    made = {"field": name, "headerName": title, "tooltipField": name, **more}
    if width:
        made |= {"width": width, "flex": 0}
    return made


def number(name: str, title: str) -> dict[str, Any]:
    """A column of numbers, "n/a" where one is unknown; files have all their digits."""
    return {
        "field": name,
        "headerName": title,
        "type": "rightAligned",
        "valueFormatter": {"function": "shown(params.value)"},
        "useValueFormatterForExport": False,
        "filter": "agNumberColumnFilter",
        "floatingFilter": False,
        "minWidth": 54 + 8 * len(title),
    }


def figure_column(figure: Figure) -> dict[str, Any]:
    """The column of a figure, named and scaled as its declaration says."""
    return number(figure.name, f"{figure.name}, {figure.unit.symbol}")


def field_columns(fields: Fields[Row], *names: str, down: str = "") -> list[dict[str, Any]]:
    """The columns of the fields *names*; rows are sorted by *down*, the largest value first."""
    made = [
        column(name, name, minWidth=150)
        if fields[name].unit is TEXT
        else number(name, f"{name}, {fields[name].unit.symbol}".removesuffix(", "))
        for name in names
    ]
    return [{**one, "sort": "desc"} if one["field"] == down else one for one in made]


def field_rows(rows: Iterable[Row], fields: Fields[Row], *names: str) -> list[dict[str, Any]]:
    """Values of the fields *names* in the units of :func:`field_columns`; None where unknown."""
    return [
        {"id": str(number), **{name: fields[name].scaled(row) for name in names}}
        for number, row in enumerate(rows)
    ]


def finding_list(findings: Sequence[Finding], total: int) -> list[Any]:
    """The *findings*, and how many of *total* are left out."""
    if not total:
        return [dmc.Text("Nothing to report.", c="dimmed", size="sm")]
    shown = [_finding(finding) for finding in findings]
    more = total - len(findings)
    return [*shown, *([dmc.Text(f"and {more} more under Advice", size="sm")] if more else [])]


def _finding(finding: Finding) -> Any:
    lines: list[Any] = [
        dmc.Group(
            [
                dmc.Badge(
                    finding.code or finding.rule,
                    color=SEVERITY_COLOURS[finding.severity],
                    variant="light",
                ),
                dmc.Text(finding.severity, size="xs", c="dimmed"),
            ],
            gap="xs",
        ),
        dmc.Text(finding_text(finding), size="sm", mt=4),
    ]
    if finding.remedy is not None:
        words = remedy_text(finding.remedy)
        lines += [
            dmc.Text(words.reason, size="xs", c="dimmed", mt=4),
            html.Pre([_diff_line(line) for line in words.diff], className="diff"),
            dmc.Text(words.outlook, size="xs"),
        ]
    return dmc.Paper(lines, p="sm", className=f"finding {finding.severity}")


def _diff_line(line: DiffLine) -> Any:
    kind = {"added": "in", "removed": "out"}.get(line.kind, "same")
    return html.Span(line.text + "\n", className=kind)


def configurations(compared: Comparison) -> Any:
    """A table of what the runs do not have alike: configuration, command, environment."""
    rows = configuration(compared)
    unknown = [letter(n) for n in compared.environment.unknown]
    lines = [f"The environment of {', '.join(unknown)} was not recorded."] if unknown else []
    if not rows:
        lines.append("No difference in configuration and environment is known.")
    heads = [
        html.Th([letter(n), " ", dcc.Link(one.runs[0], href=f"/run/{one.runs[0]}/overview")])
        for n, one in enumerate(compared.columns)
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
    shown = [dmc.TableScrollContainer(table, minWidth=240 * len(heads))] if rows else []
    return html.Div(
        [
            heading("Configuration"),
            *shown,
            *(dmc.Text(line, size="sm", c="dimmed") for line in lines),
        ]
    )


def trouble(text: str, hint: str = "", ways: Mapping[str, str] | None = None) -> Any:
    """A page that says why there is nothing to show. *ways*: where else to go, text -> address."""
    out = [html.Li(dcc.Link(told, href=address)) for told, address in (ways or {}).items()]
    parts = [html.P(text), html.P(hint), *([html.Ul(out)] if out else [])]
    return dmc.Alert(parts, title="This cannot be shown", color="red", className="trouble")
