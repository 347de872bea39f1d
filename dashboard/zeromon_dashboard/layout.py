"""The pages of a run. Pure: what is known of the run in, components out.

A page is named parts, each with the properties that change. The same function makes them for the first
view and for every later one; an open tab receives the parts whose properties have changed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.base.units import human_count
from zeromon.readout.answers import VerdictPeriod, findings_to_act_on, life_of_run
from zeromon.readout.figures import LAST_STEPS
from zeromon.readout.text import clock, has_died, pause_seconds, pause_text, rough_time
from zeromon.readout.verdict import SIGNS, judge_run, state_beside, unanswered_verdict
from zeromon.snapshot import RankSnapshot, RunSnapshot, Severity
from zeromon_dashboard.page import Known, Page, Parts, Props
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
        dmc.Text(id="facts", size="sm", c="dimmed", **props["facts"]),
        dmc.Group(id="about", gap="xs", **props["about"]),
        dmc.Badge(id="state", variant="dot", **props["state"]),
    ]
    change: Any = html.A("What to change", href="#to-change")
    if route.page != "overview":
        change = dcc.Link("What to change", href=replace(route, page="advice").address)
    head = [dmc.Group(heading, gap="md", align="center"), verdict_banner(change, props)]
    controls = [_player_panel(route, span, props), _page_controls(route, ranks, runs)]
    return dmc.Stack([*head, *controls, *body], gap="sm")


def verdict_banner(change: Any, props: Parts) -> Any:
    """The verdict, and the link *change* to what to do about it."""
    banner = [
        html.Div([html.Span(id="sign", **props["sign"]), html.Span(id="health", **props["health"])],
                 className="word"),
        html.Div([
            html.P(id="cause", **props["cause"]),
            html.P([html.Span(id=name, **props[name]) for name in ("detail", "verdict")]),
        ]),
        html.Div(change, id="act", **props["act"]),
    ]  # fmt: skip
    return html.Div(banner, id="banner", **props["banner"])


_TONES = {
    None: "well", Severity.INFO: "over", Severity.WARNING: "warning", Severity.CRITICAL: "critical",
}  # fmt: skip
"""Severity of a verdict -> the class of its banner."""


def _page_head_props(view: Known) -> Parts:
    run, first_rank = view.run, (view.run.ranks[0] if view.run.ranks else None)
    facts = _run_facts_text(run, first_rank) if first_rank is not None else ""
    if view.where.at is not None:
        state, colour = f"as at {clock(run.taken_wall)}", "violet"
    elif view.trouble:
        state, colour = "no answer", "red"
    elif run.ended or not view.live:
        state, colour = "recorded", "gray.5"  # gray is no colour in the dark
    elif (pause := pause_seconds(run)) is not None:
        state, colour = pause_text(pause), "orange"
    elif run.detached:
        state, colour = "detached", "gray.5"
    elif run.ranks and not any(rank.status.alive for rank in run.ranks):
        state, colour = "ending", "gray.5"
    else:
        state, colour = "live", "teal"
    judged = unanswered_verdict(run, view.age) if view.trouble and not run.ended else judge_run(run)
    # The cause of a death says in which step it was
    state_text = "" if has_died(run) and run.last_attempt == 1 else state_beside(judged.health, run)
    state_text = "; ".join(phrase for phrase in state_text.split("; ") if phrase not in judged.cause)
    note, until_wall = view.about.note, view.span[1] if view.span is not None else 0.0
    life = life_of_run(run, view.findings, until_wall)
    tags = (dmc.Badge(t, variant="outline", color="gray", tt="none") for t in view.about.tags)
    return {
        "banner": {"className": _TONES[judged.severity]},
        "sign": {"children": SIGNS[judged.severity]},
        "act": {"style": {} if findings_to_act_on(run) else {"display": "none"}},
        "health": {"children": str(judged.health)},
        "cause": {"children": judged.headline},
        "facts": {"children": facts},
        "about": {"children": [*tags, *([dmc.Text(note, size="sm")] if note else [])]},
        "state": {"children": state, "color": colour},
        "detail": {"children": judged.detail + "; " * bool(judged.detail and state_text)},
        "verdict": {"children": state_text},
        "life": {"style": {"background": _life_gradient(life, view.span)}},
        "life-key": {"children": _life_key(life, run)},
        "when": _player_moments(view),
    }


_NARROW = 0.8
"""A severe period has at least so many percent of the strip."""


def _life_gradient(life: Sequence[VerdictPeriod], span: tuple[float, float] | None) -> str:
    """A background with the colour of each verdict, from the first recorded moment to the last."""
    start_wall, end_wall = span or (0.0, 0.0)
    if end_wall <= start_wall:
        return "var(--zm-over)"
    stops, drawn = [], 0.0
    for period in life:
        width = _NARROW if period.severity is Severity.CRITICAL else 0.0
        share = 100 * (period.end_wall - start_wall) / (end_wall - start_wall)
        percent = min(100.0, max(share, drawn + width))
        if percent > drawn:
            stops.append(f"var(--zm-{_TONES[period.severity]}) {drawn:.1f}% {percent:.1f}%")
            drawn = percent
    return f"linear-gradient(to right, {', '.join(stops)})" if stops else "var(--zm-over)"


def _life_key(life: Sequence[VerdictPeriod], run: RunSnapshot) -> list[Any]:
    """The last six verdicts with their colours and the time of day of their beginnings, and the end."""
    long_periods = [p for p in life if p.severity is Severity.CRITICAL or p.end_wall >= 1 + p.start_wall]
    key: list[Any] = [
        html.Span([html.I(className=_TONES[p.severity]), f"{p.health} from {clock(p.start_wall)[11:]}"])
        for p in long_periods[-6:]
    ]
    key[:0] = [f"{len(long_periods) - 6} earlier, "] if long_periods[6:] else []
    return [*key, html.Span(f"ended {clock(run.taken_wall)[11:]}")] if run.ended and key else key


def _player_moments(view: Known) -> Props:
    """The last recorded moment, which the player shows while it is at the end."""
    if view.span is None:
        return {}
    end_wall = view.span[1]
    return {"max": end_wall} | ({} if view.where.at is not None else {"value": end_wall})


def _run_facts_text(run: RunSnapshot, rank: RankSnapshot) -> str:
    fleet = run.fleet
    reporting, location = len(run.ranks), f"{rank.device} of {run.node}"
    if fleet is not None:
        reporting, location = fleet.ranks - fleet.silent, f"{human_count(len(fleet.nodes))} nodes"
    count = f"{human_count(reporting)} of {human_count(rank.world_size)} ranks on {location}"
    lasted = rough_time(max(0.0, run.taken_wall - run.started_wall))
    return f"{rank.strategy} · {count} · started {clock(run.started_wall)}, {lasted}"


def _page_controls(route: Route, ranks: Sequence[int], runs: Sequence[str]) -> Any:
    choices = [{"value": str(n), "label": f"last {human_count(n)}" if n else "all steps"} for n in LASTS]
    steps = route.steps
    if steps is not None:
        choices.append({"value": "steps", "label": f"{steps[0]:,} to {steps[1]:,}"})
    scope = f"charts only; cards and tables: {LAST_STEPS}" if steps is not None else None
    controls = dmc.Group(
        [
            dmc.SegmentedControl(
                id="last", value=str(route.last) if steps is None else "steps", data=choices,
            ),
            dmc.TextInput(
                id="steps", **{"aria-label": "steps to show, from-to; empty for all"}, w=150,
                placeholder="steps, as 100-150", value="" if steps is None else f"{steps[0]}-{steps[1]}",
            ),
            scope and dmc.Text(scope, id="steps-scope", size="sm", c="dimmed"),
            dmc.MultiSelect(
                id="ranks", **{"aria-label": "ranks to show"}, placeholder="all ranks", maxValues=8,
                value=[*map(str, route.ranks)],
                data=[{"value": str(n), "label": f"rank {n}"} for n in ranks],
            ),
            dmc.MultiSelect(
                id="with", **{"aria-label": "runs whose charts are laid over these"},
                placeholder="lay over another run", maxValues=MAX_RUNS - 1, value=[*route.others],
                data=[name for name in dict.fromkeys((*route.others, *runs)) if name != route.run],
            ),
        ],
        gap="sm",
    )  # fmt: skip
    links = [
        html.A("CSV", id="csv", className="plain", href=table_csv_address(route), download=""),
        html.A("report", className="plain", href=f"/report/{route.run}.html", target="_blank"),
    ]
    is_filtered = bool(route.ranks or steps or route.others or route.last != LASTS[-1])
    summary = html.Summary("Filter: steps, ranks, another run")
    filters = html.Details([summary, controls], id="filter", open=is_filtered)
    return dmc.Group([filters, *links], gap="md")


def table_csv_address(route: Route) -> str:
    """The address of this page's table as CSV."""
    table = {"communication": "traffic", "ranks": "ranks"}.get(route.page, "steps")
    return f"/csv/{route.run}/{table}" + "".join(route.address.partition("?")[1:])


def _player_panel(route: Route, span: tuple[float, float] | None, props: Parts) -> Any:
    """The run's life, in the colours of its verdicts, on which a moment is chosen."""
    has_past = span is not None and span[1] - span[0] >= 1
    start_wall, end_wall = span if span is not None and has_past else (0.0, 1.0)
    slider = dmc.Slider(
        id="when", min=start_wall, step=0.1, label=None, thumbLabel="moment that the page shows",
        updatemode="mouseup", **{"max": end_wall, "value": route.at or end_wall, **props["when"]},
    )  # fmt: skip
    strip = [html.Div(slider, id="life", **props["life"]), html.Div(id="life-key", **props["life-key"])]
    controls = [
        dmc.Button("play", id="play"),
        dmc.Select(
            id="speed", **{"aria-label": "speed of the playback"}, w=80, value="10", allowDeselect=False,
            data=[{"value": str(n), "label": f"{n} x"} for n in (1, 10, 60, 600, 3600)],
        ),
        html.Div(strip, className="lived"),
        dmc.Text(clock(route.at) if route.at is not None else "", id="when-text", size="sm"),
        dmc.Button("end", id="now"),
    ]  # fmt: skip
    return dmc.Group(controls, gap="sm", style={} if has_past else {"display": "none"})


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
    head = [
        dcc.Link(dmc.Text("zeromon", fw=800, size="lg"), href="/", className="plain"),
        dmc.Text(id="lost", c="red", size="sm"),
        dmc.Switch(id="dark", label="dark", size="sm"),
    ]
    keys = f"Keys: 0 to {len(PAGES)} pages, d dark, space play"
    navigation = [
        dmc.NavLink(label="0  Runs", id="nav-runs", href="/", className="nav"),
        dmc.Divider(my=4),
        html.Div(links, id="pages"),
        dmc.Text(keys, size="xs", c="dimmed", mt="md"),
    ]
    shell = [
        dmc.AppShellHeader(dmc.Group(head, justify="space-between", h="100%", px="md")),
        dmc.AppShellNavbar(navigation, p="xs"),
        dmc.AppShellMain(html.Div(id="page")),
    ]
    navbar = {"width": 170, "breakpoint": "sm"}
    return dmc.MantineProvider(
        id="theme",
        theme={"components": {name: {"defaultProps": defaults} for name, defaults in _USUAL.items()}},
        children=[
            dcc.Location(id="url", refresh=False),
            *(dcc.Store(id=name) for name in ("route", "at", "cursor", "sink")),
            dcc.Interval(id="tick", interval=1000),
            dmc.AppShell(shell, header={"height": 46}, navbar=navbar, padding="sm"),
        ],
    )
