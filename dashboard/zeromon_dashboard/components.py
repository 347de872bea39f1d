"""The components that the parts of a page go into, and the frame around all pages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.compare import Column, Comparison, Row, change, grouped, letter, shown
from zeromon.units import human_count
from zeromon_dashboard import charts, views
from zeromon_dashboard.hub import Item
from zeromon_dashboard.layout import Page, Parts, Props, clock, rounded
from zeromon_dashboard.where import LASTS, PAGES, Where

CONFIG = {
    "displaylogo": False,
    "showSendToCloud": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["lasso2d", "select2d"],
}


def skeleton(
    where: Where, page: Page, span: tuple[float, float] | None, ranks: Sequence[int]
) -> Any:
    """The components of a page with their first properties."""
    parts = {**page.parts, **{n: {"figure": c.figure()} for n, c in page.charts.items()}}
    body = _SKELETONS[where.page](parts, where)
    return dmc.Stack(
        [_title(where, parts), _controls(where, ranks), *body, _player(where, span)], gap="sm"
    )


def _title(where: Where, parts: Parts) -> Any:
    return dmc.Group(
        [
            dmc.Title(where.run, order=3),
            dmc.Badge(id="state", variant="dot", **parts["state"]),
            dmc.Text(id="verdict", fw=600, **parts["verdict"]),
            dmc.Text(id="facts", size="sm", **{"c": "dimmed", **parts["facts"]}),
        ],
        gap="md",
        align="center",
    )


def _controls(where: Where, ranks: Sequence[int]) -> Any:
    names = {0: "all steps"}
    return dmc.Group(
        [
            dmc.SegmentedControl(
                id="last",
                size="xs",
                value=str(where.last),
                data=[
                    {"value": str(n), "label": names.get(n, f"last {human_count(n)}")}
                    for n in LASTS
                ],
            ),
            dmc.MultiSelect(
                id="ranks",
                size="xs",
                placeholder="all ranks",
                searchable=True,
                clearable=True,
                limit=64,
                maxValues=8,
                w=260,
                value=[str(n) for n in where.ranks],
                data=[{"value": str(n), "label": f"rank {n}"} for n in ranks],
            ),
            html.A("CSV", id="csv", className="plain", href=csv_of(where), download=""),
            html.A("report", className="plain", href=f"/report/{where.run}.html", target="_blank"),
        ],
        gap="sm",
    )


def csv_of(where: Where) -> str:
    """Where the table of this page is to be had as CSV."""
    table = {"communication": "traffic", "ranks": "ranks"}.get(where.page, "steps")
    return (
        f"/csv/{where.run}/{table}"
        + where.address.partition("?")[1]
        + where.address.partition("?")[2]
    )


def _player(where: Where, span: tuple[float, float] | None) -> Any:
    if span is None or span[1] - span[0] < 1:
        return html.Div(_player_controls(where, (0.0, 1.0)), style={"display": "none"})
    return dmc.Paper(_player_controls(where, span), withBorder=True, p="xs", radius="md")


def _player_controls(where: Where, span: tuple[float, float]) -> Any:
    return dmc.Group(
        [
            dmc.Button("play", id="play", size="xs", variant="light"),
            dmc.Select(
                id="speed",
                size="xs",
                w=90,
                value="10",
                allowDeselect=False,
                data=[{"value": str(n), "label": f"{n} x"} for n in (1, 10, 60, 600, 3600)],
            ),
            html.Div(
                dmc.Slider(
                    id="when",
                    min=span[0],
                    max=span[1],
                    value=where.at or span[1],
                    step=0.1,
                    label=None,
                    updatemode="mouseup",
                    size="sm",
                ),
                style={"flex": 1, "minWidth": 200},
            ),
            dmc.Text(clock(where.at) if where.at is not None else "now", id="when-text", size="sm"),
            dmc.Button("now", id="now", size="xs", variant="light"),
        ],
        gap="sm",
        wrap="nowrap",
    )


def _graph(name: str, parts: Parts) -> Any:
    return dmc.Paper(
        dcc.Graph(id=name, config=CONFIG, **parts[name]), withBorder=True, p=4, radius="md"
    )


def _maybe(name: str, parts: Parts) -> Any:
    return dmc.Paper(
        [
            html.Div(
                dcc.Graph(id=name, config=CONFIG, **parts[name]),
                id=f"{name}-shown",
                **parts[f"{name}-shown"],
            ),
            html.Div(id=f"{name}-absent", className="absent", **parts[f"{name}-absent"]),
        ],
        withBorder=True,
        p=4,
        radius="md",
    )


def _cards(parts: Parts) -> Any:
    return dmc.SimpleGrid(
        id="cards", cols={"base": 1, "sm": 2, "lg": 4}, spacing="sm", **parts["cards"]
    )


def _two(left: Any, right: Any) -> Any:
    return dmc.SimpleGrid([left, right], cols={"base": 1, "lg": 2}, spacing="sm")


def _heading(text: str) -> Any:
    return dmc.Title(text, order=5)


def _grid(
    name: str, columns: Sequence[dict[str, Any]], rows: Props, height: int, **options: Any
) -> Any:
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
            **options,
        },
        style={"height": min(height, 90 + 28 * max(2, len(rows["rowData"])))},
        **rows,
    )


def _column(name: str, title: str, width: int = 0, **more: Any) -> dict[str, Any]:
    made = {"field": name, "headerName": title, **more}
    if width:
        made |= {"width": width, "flex": 0}
    return made


def _number(name: str, title: str) -> dict[str, Any]:
    return {
        "field": name,
        "headerName": title,
        "type": "rightAligned",
        "filter": "agNumberColumnFilter",
        "floatingFilter": False,
        "minWidth": 104,
    }


_TRAFFIC = (
    _column("unit", "unit or bucket", minWidth=220, tooltipField="unit"),
    _column("op", "operation"),
    _column("phase", "phase"),
    _column("group", "group"),
    _number("calls", "calls"),
    _number("mib", "MiB"),
    _number("ms", "time, ms"),
    _number("waits", "waits, ms"),
    {**_number("exposed", "exposed, ms"), "sort": "desc"},
    _number("busbw", "busbw, GB/s"),
    _number("best", "best, GB/s"),
)
_RANKS = (
    _column("rank", "rank", 80, pinned="left", filter="agNumberColumnFilter"),
    _column("node", "node"),
    _column("device", "device"),
    _column("state", "state"),
    _number("steps", "steps"),
    _number("step", "step, ms"),
    _number("exposed", "exposed, %"),
    _number("overlap", "overlap, %"),
    _number("memory", "memory, GiB"),
    _number("risk", "OOM risk, %"),
    _number("late", "late, ms"),
    _number("waits", "waits, ms"),
    _column("unit", "unit"),
)


def _overview_page(parts: Parts, _: Where) -> list[Any]:
    return [
        _cards(parts),
        html.Div(id="spreads", **parts["spreads"]),
        _two(_graph("breakdown", parts), _graph("exposed", parts)),
        _two(_graph("step-time", parts), _graph("memory", parts)),
        _heading("Findings"),
        dmc.Stack(id="findings", gap="xs", **parts["findings"]),
    ]


def _memory_page(parts: Parts, _: Where) -> list[Any]:
    return [
        _cards(parts),
        _graph("memory", parts),
        _two(_maybe("roles", parts), _maybe("within", parts)),
        dmc.Text(id="rests", size="sm", c="dimmed", **parts["rests"]),
    ]


def _communication_page(parts: Parts, _: Where) -> list[Any]:
    return [
        dmc.Title(id="traffic-title", order=5, **parts["traffic-title"]),
        _grid("traffic", _TRAFFIC, parts["traffic"], 360),
        _two(
            html.Div(
                [_heading("In flight"), dmc.Stack(id="in-flight", gap=4, **parts["in-flight"])]
            ),
            html.Div(
                [
                    _heading("Timeline"),
                    dmc.Group(
                        [
                            dmc.Button(
                                "capture a trace of 2 steps",
                                id="capture",
                                size="xs",
                                variant="light",
                            ),
                            dmc.Button("show it", id="show-trace", size="xs", variant="light"),
                            dmc.Text(id="capture-state", size="sm", **parts["capture-state"]),
                        ],
                        gap="sm",
                    ),
                    dmc.Text(id="capture-said", size="sm", c="orange"),
                ]
            ),
        ),
        dcc.Loading(html.Div(id="timeline")),
        _maybe("own-time", parts),
        _two(_maybe("busbw", parts), _maybe("sizes", parts)),
    ]


def _ranks_skeleton(parts: Parts, where: Where) -> list[Any]:
    return [
        dmc.SegmentedControl(
            id="metric",
            size="xs",
            value=where.metric,
            data=[
                {"value": key, "label": name.split(",")[0]}
                for key, (name, _, _) in views.METRICS.items()
            ],
        ),
        _graph("rank-map", parts),
        dmc.Stack(id="stragglers", gap="xs", **parts["stragglers"]),
        dmc.Text(id="rank-count", size="sm", c="dimmed", **parts["rank-count"]),
        _grid("rank-table", _RANKS, parts["rank-table"], 420),
    ]


def _advice_page(parts: Parts, _: Where) -> list[Any]:
    return [
        dmc.Stack(id="findings", gap="xs", **parts["findings"]),
        _heading("Earlier"),
        dmc.Stack(id="earlier", gap=2, **parts["earlier"]),
    ]


_SKELETONS = {
    "overview": _overview_page,
    "memory": _memory_page,
    "communication": _communication_page,
    "ranks": _ranks_skeleton,
    "advice": _advice_page,
}


# ---- the list of runs, and the frame --------------------------------------------------------------


def runs_page(items: Sequence[Item], comparison: Any = None) -> Any:
    """All runs; those that are chosen can be compared."""
    if not items:
        return dmc.Alert(
            [
                html.P("No run has been recorded yet. Start one:"),
                html.Pre("zeromon run -- torchrun --nproc-per-node 2 train.py"),
            ],
            title="Nothing to see yet",
            color="blue",
        )
    return dmc.Stack(
        [
            dmc.Group(
                [
                    dmc.Title("Runs", order=3),
                    dmc.Button("compare those chosen", id="compare", size="xs", variant="light"),
                    dmc.Text("click a run to open it", size="sm", c="dimmed"),
                ]
            ),
            _grid(
                "run-table",
                _RUNS,
                {"rowData": run_rows(items)},
                420,
                rowSelection={"mode": "multiRow", "enableClickSelection": False},
            ),
            html.Div(comparison, id="comparison"),
        ],
        gap="sm",
    )


_RUNS = (
    _column("run", "run", minWidth=200, pinned="left"),
    _column("state", "state", minWidth=220),
    _column("started", "started", minWidth=170, filter="agTextColumnFilter"),
    _column("strategy", "strategy"),
    _number("ranks", "ranks"),
    _number("steps", "steps"),
    _number("step", "step, ms"),
    _number("exposed", "exposed, %"),
    _number("memory", "memory, GiB"),
    _column("worst", "findings"),
    _column("command", "command", minWidth=240, tooltipField="command"),
)


def run_rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The table of runs."""
    return [
        {
            "id": m.run,
            "run": m.run,
            "state": m.verdict if item.live or m.ended else f"no longer watched: {m.verdict}",
            "started": clock(m.started_wall),
            "strategy": m.strategy,
            "ranks": m.ranks,
            "steps": m.steps,
            "step": rounded(None if m.step_seconds is None else 1e3 * m.step_seconds),
            "exposed": rounded(None if m.exposed_ratio is None else 100 * m.exposed_ratio),
            "memory": rounded(m.memory_bytes / charts.GIB if m.memory_bytes >= 0 else None),
            "worst": m.worst or "none",
            "command": " ".join(m.command),
        }
        for item in items
        for m in (item.manifest,)
    ]


def comparison(found: Comparison) -> Any:
    """Runs side by side: which to take, and what differs by more than the noise."""
    advice = found.advice
    heads = [_compared_head(number, column) for number, column in enumerate(found.columns)]
    marks = f"Marked is what differs from {letter(0)} by more than the noise."
    return dmc.Stack(
        [
            dmc.Alert(
                html.Ul([html.Li(why) for why in advice.reasons]),
                title=advice.text[:1].upper() + advice.text[1:],
                color="gray" if advice.take is None else "teal",
            ),
            dmc.Table(
                [
                    html.Thead(html.Tr([html.Th(""), *heads])),
                    html.Tbody([line for part in grouped(found) for line in _compared(*part)]),
                ],
                withTableBorder=True,
                withRowBorders=True,
                highlightOnHover=True,
                verticalSpacing=4,
            ),
            dmc.Text(marks, size="xs", c="dimmed"),
        ],
        gap="sm",
    )


def _compared_head(number: int, column: Column) -> Any:
    ended = f", {column.ended}" if column.died else ""
    return html.Th(
        [
            dcc.Link(f"{letter(number)}  {column.runs[0]}", href=f"/run/{column.runs[0]}/overview"),
            dmc.Text(
                f"{column.strategy}, {human_count(column.steps)} steps{ended}",
                size="xs",
                c="dimmed",
            ),
        ]
    )


def _compared(title: str, rows: Sequence[Row]) -> list[Any]:
    head = html.Tr(html.Th(title, colSpan=1 + len(rows[0].cells))) if rows else None
    lines = [
        html.Tr([html.Td(row.label), *(_compared_cell(row, n) for n in range(len(row.cells)))])
        for row in rows
    ]
    return [head, *lines] if head is not None else []


def _compared_cell(row: Row, number: int) -> Any:
    cell = row.cells[number]
    if cell.value is None:
        return html.Td(dmc.Text("n/a", size="sm", c="dimmed"), title=cell.why)
    colour = ("teal" if cell.better else "orange") if cell.marked else "dimmed"
    return html.Td(
        [
            html.Span(shown(cell.value, row.unit), className="figure"),
            dmc.Text(
                change(row, number),
                size="xs",
                c=colour,
                span=True,
                ml=8,
                fw=700 if cell.marked else 400,
            ),
        ]
    )


def frame() -> Any:
    """What stays while pages change."""
    links = [
        dmc.NavLink(label=f"{n}  {title}", id=f"nav-{name}", href="#", className="nav")
        for n, (name, title) in enumerate(PAGES.items(), 1)
    ]
    return dmc.MantineProvider(
        id="theme",
        children=[
            dcc.Location(id="url", refresh=False),
            dcc.Store(id="route"),
            dcc.Store(id="at"),
            dcc.Store(id="cursor"),
            dcc.Store(id="sink"),
            dcc.Interval(id="tick", interval=1000),
            dmc.AppShell(
                [
                    dmc.AppShellHeader(
                        dmc.Group(
                            [
                                dcc.Link(
                                    dmc.Text("zeromon", fw=800, size="lg"),
                                    href="/",
                                    className="plain",
                                ),
                                dmc.Text(id="lost", c="red", size="sm"),
                                dmc.Switch(id="dark", label="dark", size="sm"),
                            ],
                            justify="space-between",
                            h="100%",
                            px="md",
                        )
                    ),
                    dmc.AppShellNavbar(
                        [
                            dmc.NavLink(label="0  Runs", id="nav-runs", href="/", className="nav"),
                            dmc.Divider(my=4),
                            html.Div(links, id="pages"),
                            dmc.Text(
                                "keys: 0 to 5, d dark, space play", size="xs", c="dimmed", mt="md"
                            ),
                        ],
                        p="xs",
                    ),
                    dmc.AppShellMain(html.Div(id="page")),
                ],
                header={"height": 46},
                navbar={"width": 170, "breakpoint": "sm"},
                padding="sm",
            ),
        ],
    )


def trouble(text: str, hint: str = "") -> Any:
    """A page that says why there is none."""
    return dmc.Alert([html.P(text), html.P(hint)], title="This cannot be shown", color="red")
