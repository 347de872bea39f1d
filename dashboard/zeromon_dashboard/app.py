"""The dashboard: Dash makes the pages, plain routes carry what changes. ``zeromon dash`` serves it."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, dcc
from fastapi import Request, Response

from zeromon.errors import CaptureRefused, TraceError, ZeromonError
from zeromon.report import render
from zeromon.source import LiveSource
from zeromon.tracefile import read
from zeromon.traces import lanes
from zeromon.units import no_formula
from zeromon_dashboard import components, figures, layout
from zeromon_dashboard.feed import Cursor, Feeds
from zeromon_dashboard.guard import Guard
from zeromon_dashboard.hub import Hub
from zeromon_dashboard.pages import run_page
from zeromon_dashboard.where import PAGES, Where, parse

_MOST_TRACE_BYTES = 256 << 20


def make_app(hub: Hub, *, token: str, port: int, loopback: bool = True) -> Any:
    """The ASGI application."""
    app = Dash(
        __name__,
        backend="fastapi",
        title="zeromon",
        update_title=None,
        serve_locally=True,
        suppress_callback_exceptions=True,
        compress=False,
        enable_mcp=False,
        assets_folder=str(Path(__file__).parent / "assets"),
    )
    feeds = Feeds(hub)
    app.layout = components.frame
    _callbacks(app, feeds)
    _routes(app.server, feeds)
    app.backend.websocket_capability = False  # else every tab keeps trying to open one
    # else the very first page that is asked for comes without our scripts
    app._setup_server()
    hashes = app.csp_hashes()
    return Guard(app.server, token=token, loopback=loopback, port=port, hashes=hashes)


# ---- what Dash calls ------------------------------------------------------------------------------


def _callbacks(app: Any, feeds: Feeds) -> None:
    @app.callback(
        Output("page", "children"), Output("cursor", "data"), Input("route", "data"),
        prevent_initial_call=True,
    )  # fmt: skip
    def show(route: str) -> tuple[Any, Any]:
        where = parse(*_split(route))
        if not where.run:
            return _runs(feeds.hub, where), None
        try:
            feed = feeds.of(where)
            page, cursor = feed.page()
            return components.skeleton(where, page, feed.span, feed.ranks), cursor.as_json()
        except ZeromonError as error:
            return components.trouble(str(error), error.hint), None

    @app.callback(
        Output("timeline", "children"), Input("show-trace", "n_clicks"), State("route", "data"),
        prevent_initial_call=True,
    )  # fmt: skip
    def timeline(clicks: int | None, route: str) -> Any:
        if not clicks:
            return None
        try:
            return _timeline(feeds.hub, parse(*_split(route)))
        except (ZeromonError, OSError) as error:
            return components.trouble(str(error), getattr(error, "hint", ""))

    client = app.clientside_callback

    def told(name: str) -> ClientsideFunction:
        return ClientsideFunction("zeromon", name)

    client(
        told("route"), Output("route", "data"), Output("at", "data"),
        Input("url", "pathname"), Input("url", "search"), State("route", "data"),
    )  # fmt: skip
    client(
        told("poll"), Output("cursor", "data", allow_duplicate=True), Input("tick", "n_intervals"),
        State("route", "data"), State("at", "data"), State("cursor", "data"),
        prevent_initial_call=True,
    )  # fmt: skip
    client(
        told("links"), *(Output(f"nav-{name}", "href") for name in PAGES),
        *(Output(f"nav-{name}", "active") for name in ("runs", *PAGES)), Output("pages", "style"),
        Input("route", "data"),
    )  # fmt: skip
    client(
        told("chosen"), Output("url", "search", allow_duplicate=True),
        Input("last", "value"), Input("ranks", "value"), prevent_initial_call=True,
    )  # fmt: skip
    client(
        told("measured"), Output("url", "search", allow_duplicate=True), Input("metric", "value"),
        prevent_initial_call=True,
    )  # fmt: skip
    for name, event in (("rank-map", "clickData"), ("rank-table", "cellClicked")):
        client(
            told("drill"), Output("url", "search", allow_duplicate=True),
            Output("url", "pathname", allow_duplicate=True), Input(name, event),
            prevent_initial_call=True,
        )  # fmt: skip
    client(
        told("open"), Output("url", "pathname", allow_duplicate=True),
        Output("url", "search", allow_duplicate=True), Input("run-table", "cellClicked"),
        prevent_initial_call=True,
    )  # fmt: skip
    client(
        told("compare"), Output("url", "search", allow_duplicate=True),
        Input("compare", "n_clicks"), State("run-table", "selectedRows"), prevent_initial_call=True,
    )  # fmt: skip
    client(
        told("seek"), Output("at", "data", allow_duplicate=True), Output("when-text", "children"),
        Input("when", "value"), State("when", "max"), prevent_initial_call=True,
    )  # fmt: skip
    client(
        told("now"), Output("when", "value"), Input("now", "n_clicks"), State("when", "max"),
        prevent_initial_call=True,
    )  # fmt: skip
    client(
        told("play"), Output("play", "children"), Input("play", "n_clicks"), Input("speed", "value"),
        State("when", "min"), State("when", "max"), State("when", "value"), prevent_initial_call=True,
    )  # fmt: skip
    client(
        told("capture"), Output("capture-said", "children"), Input("capture", "n_clicks"),
        State("route", "data"), prevent_initial_call=True,
    )  # fmt: skip
    client(told("dark"), Output("theme", "forceColorScheme"), Input("dark", "checked"))
    client(told("remembered"), Output("dark", "checked"), Input("url", "id"))


def _split(route: str) -> tuple[str, str]:
    path, _, query = str(route or "/").partition("?")
    return path, query


def _runs(hub: Hub, where: Where) -> Any:
    comparison: Any = None
    if len(where.compared) > 1:
        try:
            comparison = components.comparison(hub.compared(where.compared))
        except ZeromonError as error:
            comparison = components.trouble(str(error), error.hint)
    return components.runs_page(hub.runs(), comparison)


def _timeline(hub: Hub, where: Where) -> Any:
    """The last trace of a run as lanes."""
    run = hub.followed(where.run).seen().run
    capture = run.capture
    if capture is None or not capture.files:
        raise TraceError("no trace was taken of this run", "Capture one while it runs.")
    paths = [Path(capture.folder) / name for name in capture.files]
    large = sum(path.stat().st_size for path in paths)
    if large > _MOST_TRACE_BYTES:
        raise TraceError(
            f"the trace is {large >> 20} MiB: too large to be drawn here",
            f"zeromon trace analyze {capture.folder} --html trace.html",
        )
    rows = [(f"rank {n}", lanes(read(path))) for n, path in zip(capture.ranks, paths, strict=False)]
    return dcc.Graph(figure=figures.timeline(rows), config=components.CONFIG)


# ---- what tabs ask for ----------------------------------------------------------------------------


def _routes(server: Any, feeds: Feeds) -> None:
    def live(request: Request) -> Response:
        asked = request.query_params
        where = parse(*_split(asked.get("to", "")))
        cursor = Cursor(
            asked.get("feed", ""),
            _integer(asked.get("version", "")),
            asked.get("epoch", ""),
            float(_integer(asked.get("step", ""))),
        )
        try:
            return _json(feeds.of(where).since(cursor))
        except ZeromonError as error:
            return _json(json.dumps({"error": str(error)}), 404)

    def table(run: str, name: str, request: Request) -> Response:
        where = parse(f"/run/{run}/overview", str(request.url.query))
        try:
            content = to_csv(_rows(feeds.hub, where, name))
        except ZeromonError as error:
            return Response(str(error), 404, media_type="text/plain")
        headers = {"Content-Disposition": f'attachment; filename="{where.run}-{name}.csv"'}
        return Response(content, media_type="text/csv", headers=headers)

    def report(run: str) -> Response:
        where = parse(f"/run/{run}/overview", "")
        try:
            followed = feeds.hub.followed(where.run)
            picture = followed.seen().run
            _, series = followed.series((), 0, None)
            return Response(run_page(picture, series, render(picture)), media_type="text/html")
        except ZeromonError as error:
            return Response(str(error), 404, media_type="text/plain")

    async def trace(request: Request) -> Response:
        try:
            asked = json.loads(await request.body())
            run, steps = str(asked["run"]), int(asked.get("steps", 2))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _json(json.dumps({"error": f"not a request: {error}"}), 400)
        try:
            number = await asyncio.to_thread(_capture, feeds.hub, run, steps)
        except ZeromonError as error:
            return _json(json.dumps({"error": str(error), "hint": error.hint}), 409)
        return _json(json.dumps({"number": number}), 202)

    server.add_api_route("/live", live, methods=["GET"])
    server.add_api_route("/csv/{run}/{name}", table, methods=["GET"])
    server.add_api_route("/report/{run}.html", report, methods=["GET"])
    server.add_api_route("/act/trace", trace, methods=["POST"])


def _capture(hub: Hub, name: str, steps: int) -> int:
    source = hub.followed(name).source
    if not isinstance(source, LiveSource):
        raise CaptureRefused(f"run {name} is not live", "A trace needs a live run.")
    return source.trace(steps)


def _json(text: str, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(text, status, media_type="application/json", headers=headers)


def _integer(text: str) -> int:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return -1


def _rows(hub: Hub, where: Where, name: str) -> list[dict[str, Any]]:
    followed = hub.followed(where.run)
    run = followed.seen().run if where.at is None else followed.at(where.at)
    if name == "ranks":
        return layout.rank_rows(run)
    if name == "traffic":
        known = layout.Known(where, run, {})
        return layout.traffic_rows(known.rank)
    _, series = followed.series(where.ranks, where.last, where.at)
    return [dict(zip(series, row, strict=True)) for row in zip(*series.values(), strict=True)]


def to_csv(rows: Iterable[dict[str, Any]]) -> str:
    """A table whose texts no spreadsheet takes for formulas."""
    out = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(out, list(row))
            writer.writeheader()
        writer.writerow(
            {
                name: no_formula(value) if isinstance(value, str) else value
                for name, value in row.items()
            }
        )
    return out.getvalue()
