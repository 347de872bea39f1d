"""The pages of a run. Pure: what is known of the run in, components out.

A page is named parts, each with the properties that change. The same function makes them for the first
view and for every later one; an open tab receives the parts whose properties have changed.
"""

from collections.abc import Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.base.units import human_count
from zeromon.readout.figures import LAST_STEPS
from zeromon.readout.text import clock, pause_seconds, pause_text
from zeromon.readout.verdict import judge_run, state_beside, unanswered_verdict
from zeromon.snapshot import RankSnapshot, RunSnapshot, Severity
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.pages import advice, communication, memory, overview, ranks, timeline, whatif
from zeromon_dashboard.url_state import LASTS, MAX_RUNS, PAGES, Route

_PAGES: dict[str, Any] = {
    "overview": overview, "memory": memory, "communication": communication, "ranks": ranks,
    "advice": advice, "whatif": whatif, "timeline": timeline,
}  # fmt: skip
"""Name of a page -> the module with its ``content`` and its ``skeleton``."""


def page_of(view: Known) -> Page:
    """The page that the address in *view* names."""
    page = _PAGES[view.where.page].content(view)
    return Page({**_page_head_props(view), **page.parts}, page.charts)


def page_skeleton(
    route: Route,
    page: Page,
    span: tuple[float, float] | None,
    ranks: Sequence[int],
    runs: Sequence[str] = (),
) -> Any:
    """The components of a page, with the properties that they have first."""
    props = {**page.parts, **{n: {"figure": c.figure()} for n, c in page.charts.items()}}
    body = _PAGES[route.page].skeleton(props, route)
    heading = [
        dmc.Title(route.run, order=1, size="h3"),
        dmc.Badge(id="health", variant="filled", **props["health"]),
        dmc.Text(id="verdict", fw=600, **props["verdict"]),
        dmc.Badge(id="state", variant="dot", **props["state"]),
        dmc.Text(id="facts", size="sm", **{"c": "dimmed", **props["facts"]}),
    ]
    return dmc.Stack(
        [
            dmc.Stack(
                [
                    dmc.Group(heading, gap="md", align="center"),
                    dmc.Group(id="about", gap="xs", **props["about"]),
                    dmc.Text(id="cause", fw=600, **props["cause"]),
                ],
                gap=2,
            ),
            _page_controls(route, ranks, runs),
            *body,
            _player_panel(route, span),
        ],
        gap="sm",
    )


COLOURS = {None: "teal", Severity.INFO: "gray", Severity.WARNING: "orange", Severity.CRITICAL: "red"}
_BADGES = {
    None: "#0b6e4f", Severity.INFO: "gray.7", Severity.WARNING: "#8f4700", Severity.CRITICAL: "#b71c1c",
}  # fmt: skip
"""The colours of :data:`COLOURS` behind white text, with a contrast of 4.5 to 1."""
_LOUD = (Severity.WARNING, Severity.CRITICAL)


def _page_head_props(view: Known) -> Parts:
    run, first_rank = view.run, (view.run.ranks[0] if view.run.ranks else None)
    facts = _run_facts_text(run, first_rank) if first_rank is not None else ""
    if view.where.at is not None:
        state, colour = f"as at {clock(run.taken_wall)}", "violet"
    elif view.trouble:
        state, colour = "no answer", "red"
    elif run.ended or not view.live:
        state, colour = "recorded", "gray"
    elif (pause := pause_seconds(run)) is not None:
        state, colour = pause_text(pause), "orange"
    elif run.detached:
        state, colour = "detached", "gray"
    elif run.ranks and not any(rank.status.alive for rank in run.ranks):
        state, colour = "ending", "gray"
    else:
        state, colour = "live", "teal"
    judged = unanswered_verdict(run, view.age) if view.trouble and not run.ended else judge_run(run)
    tone, note = COLOURS[judged.severity], view.about.note
    tags = (dmc.Badge(t, variant="outline", color="gray", tt="none") for t in view.about.tags)
    remarks = [dmc.Text(note, size="sm")] if note else []
    return {
        "health": {"children": str(judged.health), "color": _BADGES[judged.severity]},
        "cause": {"children": judged.cause, "c": tone if judged.severity in _LOUD else "inherit"},
        "facts": {"children": facts},
        "about": {"children": [*tags, *remarks]},
        "state": {"children": state, "color": colour},
        "verdict": {"children": state_beside(judge_run(run).health, run)},
    }


def _run_facts_text(run: RunSnapshot, rank: RankSnapshot) -> str:
    fleet = run.fleet
    if fleet is None:
        return f"{rank.strategy}, {len(run.ranks)} of {rank.world_size} ranks, {rank.device}"
    reporting = human_count(fleet.ranks - fleet.silent)
    nodes = human_count(len(fleet.nodes))
    return f"{rank.strategy}, {reporting} of {human_count(rank.world_size)} ranks on {nodes} nodes"


def _page_controls(route: Route, ranks: Sequence[int], runs: Sequence[str]) -> Any:
    names = {0: "all steps"}
    choices = [{"value": str(n), "label": names.get(n, f"last {human_count(n)}")} for n in LASTS]
    steps = route.steps
    if steps is not None:
        choices.append({"value": "steps", "label": f"{steps[0]:,} to {steps[1]:,}"})
    scope = f"charts only; cards and tables: {LAST_STEPS}" if steps is not None else None
    return dmc.Group(
        [
            dmc.SegmentedControl(
                id="last", value=str(route.last) if steps is None else "steps", data=choices
            ),
            dmc.TextInput(
                id="steps",
                **{"aria-label": "steps to show, from-to; empty for all"},
                w=150,
                placeholder="steps, as 100-150",
                value="" if steps is None else f"{steps[0]}-{steps[1]}",
            ),
            scope and dmc.Text(scope, id="steps-scope", size="sm", c="dimmed"),
            dmc.MultiSelect(
                id="ranks",
                **{"aria-label": "ranks to show"},
                placeholder="all ranks",
                maxValues=8,
                value=[str(n) for n in route.ranks],
                data=[{"value": str(n), "label": f"rank {n}"} for n in ranks],
            ),
            dmc.MultiSelect(
                id="with",
                **{"aria-label": "runs whose charts are laid over these"},
                placeholder="lay over another run",
                maxValues=MAX_RUNS - 1,
                value=[*route.others],
                data=[name for name in dict.fromkeys((*route.others, *runs)) if name != route.run],
            ),
            html.A("CSV", id="csv", className="plain", href=table_csv_address(route), download=""),
            html.A("report", className="plain", href=f"/report/{route.run}.html", target="_blank"),
        ],
        gap="sm",
    )


def table_csv_address(route: Route) -> str:
    """The address of this page's table as CSV."""
    table = {"communication": "traffic", "ranks": "ranks"}.get(route.page, "steps")
    return f"/csv/{route.run}/{table}" + "".join(route.address.partition("?")[1:])


def _player_panel(route: Route, span: tuple[float, float] | None) -> Any:
    if span is None or span[1] - span[0] < 1:
        return html.Div(_player_controls(route, (0.0, 1.0)), style={"display": "none"})
    return dmc.Paper(_player_controls(route, span), p="xs")


def _player_controls(route: Route, span: tuple[float, float]) -> Any:
    return dmc.Group(
        [
            dmc.Button("play", id="play"),
            dmc.Select(
                id="speed",
                **{"aria-label": "speed of the playback"},
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
                    value=route.at or span[1],
                    step=0.1,
                    label=None,
                    thumbLabel="moment that the page shows",
                    updatemode="mouseup",
                    size="sm",
                ),
                style={"flex": "1 1 160px"},
            ),
            dmc.Text(clock(route.at) if route.at is not None else "now", id="when-text", size="sm"),
            dmc.Button("now", id="now"),
        ],
        gap="sm",
    )


# ---- what stays on the screen while pages change ------------------------------------------------

_SMALL = {"size": "xs"}
_USUAL = {
    "Button": {"size": "xs", "variant": "light"}, "Select": _SMALL, "TextInput": _SMALL,
    "SegmentedControl": _SMALL, "Paper": {"withBorder": True, "radius": "md"},
    "MultiSelect": {"size": "xs", "searchable": True, "clearable": True, "limit": 64, "w": 260},
    "Table": {"withTableBorder": True, "verticalSpacing": 4},
}  # fmt: skip
"""Component -> the properties that it has everywhere, unless a page gives others."""


def page_frame() -> Any:
    """The header, the navigation, and the place for the page."""
    links = [
        dmc.NavLink(label=f"{n}  {title}", id=f"nav-{name}", href="#", className="nav")
        for n, (name, title) in enumerate(PAGES.items(), 1)
    ]
    return dmc.MantineProvider(
        id="theme",
        theme={"components": {name: {"defaultProps": defaults} for name, defaults in _USUAL.items()}},
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
                                    dmc.Text("zeromon", fw=800, size="lg"), href="/", className="plain"
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
                                f"Keys: 0 to {len(PAGES)} pages, d dark, space play",
                                size="xs",
                                c="dimmed",
                                mt="md",
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
