"""Functions that Dash calls when something on a page changes: on the server, and in the browser."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from dash import ClientsideFunction, Input, Output, State

from zeromon.base.errors import ZeromonError
from zeromon.cli.plan import changes_of_run
from zeromon.readout.charts import list_names
from zeromon.snapshot.focus import first_counted
from zeromon.sources.base import sample_snapshots
from zeromon_dashboard import runs_page
from zeromon_dashboard.charts import overlaid_charts
from zeromon_dashboard.feed import Feeds
from zeromon_dashboard.hub import Hub
from zeromon_dashboard.layout import page_skeleton
from zeromon_dashboard.pages import memory as memory_page, timeline as timeline_page, whatif
from zeromon_dashboard.url_state import LANE_STEPS, PAGES, Route, parse_address
from zeromon_dashboard.widgets import trouble_alert

_MOMENTS = 48
"""Number of moments of the record, for memory by role over it."""


def add_callbacks(app: Any, feeds: Feeds) -> None:
    """Registers all callbacks with the Dash application."""
    _add_server_callbacks(app, feeds)
    _add_browser_callbacks(app)


# ---- on the server --------------------------------------------------------------------------------


def _or_show_trouble(make: Callable[..., Any]) -> Callable[..., Any]:
    """*make*, which shows in its place why it cannot."""

    def make_or_explain(*inputs: Any) -> Any:
        try:
            return make(*inputs)
        except (ZeromonError, OSError) as error:
            return trouble_alert(str(error), getattr(error, "hint", ""))

    return make_or_explain


def _add_server_callbacks(app: Any, feeds: Feeds) -> None:
    # In threads: on the event loop, a collector that is slow to answer would hold up all tabs
    def show_page(address: str) -> tuple[Any, Any]:
        route = parse_address(address)
        try:
            if not route.run:
                return _lost_page(route) if route.unknown else _runs_view(feeds.hub, route), None
            if missing := feeds.hub.missing_ranks(route):
                return trouble_alert(missing, "", _ways_out(route)), None
            feed = feeds.of(route)
            page, cursor = feed.page()
            runs = [item.manifest.run for item in feeds.hub.runs()]
            return page_skeleton(route, page, feed.span, feed.ranks, runs), cursor.as_json()
        except ZeromonError as error:
            return trouble_alert(
                str(error), error.hint, _ways_out(route, _similar_runs(feeds.hub, route))
            ), None

    app.callback(
        Output("page", "children"), Output("cursor", "data"), Input("route", "data"),
        prevent_initial_call=True,
    )(partial(asyncio.to_thread, show_page))  # type: ignore[call-arg]  # fmt: skip
    for make, *dependencies in _asked_for_parts(feeds):
        app.callback(*dependencies)(partial(asyncio.to_thread, _or_show_trouble(make)))


def _asked_for_parts(feeds: Feeds) -> Iterator[tuple[Any, ...]]:
    """The parts that a page lacks at first: the function that makes one, output, inputs, the address."""
    address = State("route", "data")

    def predict_changes(_: str, address: str) -> Any:
        route = parse_address(address)
        run = feeds.hub.followed(route.run).newest().run
        return whatif.prediction_view(changes_of_run(run, route.changes.split(), whatif.MAX_POINTS))

    def show_last_lanes(steps: str, _: int | None, address: str) -> Any:
        route = parse_address(address)
        followed = feeds.hub.followed(route.run)
        # A request may bring any value, and int() raises for most
        number = int(steps) if steps in map(str, LANE_STEPS) else LANE_STEPS[-1]
        lanes = followed.source.lanes(number, route.ranks)
        return timeline_page.timeline_view(lanes, followed.newest().run)

    def show_role_history(_: str, address: str) -> Any:
        route = parse_address(address)
        followed = feeds.hub.followed(route.run)
        counted = first_counted(followed.newest().run.ranks)
        if counted is None:
            return None
        rank = route.ranks[0] if route.ranks else counted.rank
        return memory_page.over_the_record(sample_snapshots(followed.source, _MOMENTS), rank)

    yield predict_changes, Output("predicted", "children"), Input("changes", "id"), address
    yield show_role_history, Output("roles-over", "children"), Input("roles-over", "id"), address
    yield (
        show_last_lanes, Output("lanes", "children"), Input("lane-steps", "value"),
        Input("read-lanes", "n_clicks"), address,
    )  # fmt: skip


def _lost_page(route: Route) -> Any:
    """The page of an address that leads nowhere; of a run that it names, its overview."""
    folder, run, *_ = [*route.unknown.split("/"), "", ""]
    named = parse_address(f"/run/{run}") if folder == "run" else Route()
    return trouble_alert(f"there is no page /{route.unknown}", "", _ways_out(named))


def _ways_out(route: Route, like: Sequence[str] | None = None) -> dict[str, str]:
    """Ways out of an address that cannot be shown: its run, or the runs *like* it, and all runs."""
    names = like if like is not None else [route.run] if route.run else []
    return {f"run {name}": Route(run=name).address for name in names} | {"all runs": "/"}


def _similar_runs(hub: Hub, route: Route) -> list[str]:
    """The names of runs that are like the one that was not found; the newest, where none is."""
    run_names = [item.manifest.run for item in hub.runs()]
    if route.run in run_names:
        return [route.run]
    return get_close_matches(route.run, run_names, 5, 0.5) or run_names[:5]


def _runs_view(hub: Hub, route: Route) -> Any:
    if len(route.compared) < 2:
        return runs_page.runs_page(hub.runs())
    try:
        followed_runs = [hub.followed(name) for name in route.compared]
        drawn = [(f.newest().run, f.series((), 0, None)[1]) for f in followed_runs]
        return runs_page.comparison_view(hub.compared(route.compared), overlaid_charts(drawn))
    except ZeromonError as error:
        return trouble_alert(str(error), error.hint, {"all runs": "/"})


# ---- in the browser: the functions of assets/zeromon.js ---------------------------------------------


def _add_browser_callbacks(app: Any) -> None:
    """Those of ``in_browser.json``, where others set the *shared* outputs, too; and those of a list."""

    def add(name: str, *dependencies: Any, at_load: bool = False) -> None:
        function = ClientsideFunction("zeromon", name)
        app.clientside_callback(function, *dependencies, prevent_initial_call=not at_load)

    for callback in json.loads(Path(__file__).with_name("in_browser.json").read_bytes()):
        shared = (_property(Output, name, allow_duplicate=True) for name in callback.get("shared", ()))
        others = (
            _property(kind, name)
            for key, kind in (("outputs", Output), ("inputs", Input), ("states", State))
            for name in callback.get(key, ())
        )
        add(callback["function"], *shared, *others, at_load=callback.get("at_load", False))
    links = [Output(f"nav-{name}", "href") for name in PAGES]
    links += [Output(f"nav-{name}", "active") for name in ("runs", *PAGES)]
    add("links", *links, Output("pages", "style"), Input("route", "data"), at_load=True)
    for name in (*list_names(), "own-time"):  # every chart over steps
        shared_search = Output("url", "search", allow_duplicate=True)
        add("zoomed", shared_search, Input(name, "relayoutData"))


def _property(kind: Any, name: str, **options: Any) -> Any:
    component, _, member = name.partition(".")
    return kind(component, member, **options)
