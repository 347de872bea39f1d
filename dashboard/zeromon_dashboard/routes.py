"""The plain HTTP routes: what open tabs poll, tables as CSV, the report, requests for a trace."""

import asyncio
import csv
import io
import json
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from dash import Dash
from fastapi import Request, Response
from fastapi.middleware.gzip import GZipMiddleware

from zeromon.base.errors import ZeromonError
from zeromon.base.units import formula_safe_cell
from zeromon.cli.export import make_export, write_export
from zeromon.readout.report import render_run
from zeromon.storage.run_store import Store
from zeromon_dashboard.access import Guard
from zeromon_dashboard.callbacks import add_callbacks
from zeromon_dashboard.feed import Cursor, Feeds
from zeromon_dashboard.html_report import run_page
from zeromon_dashboard.hub import Hub
from zeromon_dashboard.layout import page_frame
from zeromon_dashboard.page import Known
from zeromon_dashboard.pages.communication import traffic_table_rows
from zeromon_dashboard.pages.ranks import rank_table_rows
from zeromon_dashboard.url_state import Route, parse_address, parse_route


class _Trace(msgspec.Struct):
    """The body of ``POST /act/trace``."""

    run: str
    steps: int = 2


_TRACE = msgspec.json.Decoder(_Trace)


def add_routes(server: Any, feeds: Feeds) -> None:
    """Registers all routes with the FastAPI application."""

    # No coroutine: FastAPI runs it in a thread, so that a slow collector holds up this tab alone
    def poll_page_changes(request: Request) -> Response:
        query = request.query_params
        cursor = Cursor(
            query.get("feed", ""),
            _parse_integer(query.get("version", "")),
            query.get("epoch", ""),
            float(_parse_integer(query.get("step", ""))),
        )
        try:
            return _json_answer(feeds.of(parse_address(query.get("to", ""))).since(cursor))
        except ZeromonError as error:
            return _json_answer(json.dumps({"error": str(error)}), 404)

    def send_csv_table(
        run: str, name: Literal["ranks", "steps", "traffic"], request: Request
    ) -> Response:
        route = parse_route(f"/run/{run}/overview", str(request.url.query))
        try:
            content = to_csv(_csv_table_rows(feeds.hub, route, name))
        except ZeromonError as error:
            return Response(str(error), 404, media_type="text/plain")
        headers = {"Content-Disposition": f'attachment; filename="{route.run}-{name}.csv"'}
        return Response(content, media_type="text/csv", headers=headers)

    def send_html_report(run: str) -> Response:
        route = parse_route(f"/run/{run}/overview", "")
        try:
            followed = feeds.hub.followed(route.run)
            snapshot = followed.newest().run
            _, series = followed.series((), 0, None)
            past, annotation = followed.findings(), feeds.hub.store.about(snapshot.run)
            report = render_run(snapshot, annotation=annotation, past=past)
            page = run_page(snapshot, series, report, past, annotation)
            return Response(page, media_type="text/html")
        except ZeromonError as error:
            return Response(str(error), 404, media_type="text/plain")

    async def capture_trace(request: Request) -> Response:
        try:
            capture = _TRACE.decode(await request.body())
        # msgspec raises RecursionError for JSON that is nested too deep
        except (ValueError, RecursionError) as error:
            return _json_answer(json.dumps({"error": f"not a request: {error}"}), 400)
        try:
            # The collector answers over the network, and a coroutine that waits for it stops every tab
            number = await asyncio.to_thread(
                lambda: feeds.hub.followed(capture.run).source.trace(capture.steps)
            )
        except ZeromonError as error:
            return _json_answer(json.dumps({"error": str(error), "hint": error.hint}), 409)
        return _json_answer(json.dumps({"number": number}), 202)

    server.add_api_route("/live", poll_page_changes, methods=["GET"])
    server.add_api_route("/csv/{run}/{name}", send_csv_table, methods=["GET"])
    server.add_api_route("/report/{run}.html", send_html_report, methods=["GET"])
    server.add_api_route(
        "/trace/{run}.json.gz", partial(_send_perfetto_trace, feeds.hub), methods=["GET"]
    )
    server.add_api_route("/act/trace", capture_trace, methods=["POST"])


def _send_perfetto_trace(hub: Hub, run: str) -> Response:
    route = parse_route(f"/run/{run}/overview", "")
    try:
        snapshot = hub.followed(route.run).newest().run
        with tempfile.TemporaryDirectory(prefix="zeromon-") as folder:
            path = Path(folder) / "trace.json.gz"
            write_export("chrome-trace", make_export(snapshot, path, Store().folder(snapshot.run)))
            content = path.read_bytes()
    except ZeromonError as error:
        return Response(str(error), 404, media_type="text/plain")
    headers = {"Content-Disposition": f'attachment; filename="{route.run}.json.gz"'}
    return Response(content, media_type="application/gzip", headers=headers)


def _json_answer(json_text: str, status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(json_text, status, media_type="application/json", headers=headers)


def _parse_integer(field: str) -> int:
    try:
        return int(float(field))
    # int(float("inf")) raises OverflowError, int(float("nan")) ValueError
    except (ValueError, OverflowError):
        return -1


def _csv_table_rows(hub: Hub, route: Route, name: str) -> list[dict[str, Any]]:
    followed = hub.followed(route.run)
    run = followed.newest().run if route.at is None else followed.at(route.at)
    if name == "ranks":
        return rank_table_rows(Known(route, run, {}).chosen)
    if name == "traffic":
        return traffic_table_rows(Known(route, run, {}).rank)
    _, series = followed.series(*route.drawn)
    return [dict(zip(series, row, strict=True)) for row in zip(*series.values(), strict=True)]


def to_csv(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as CSV; a text that a spreadsheet would take for a formula gets an apostrophe in front."""
    buffer = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(buffer, list(row))
            writer.writeheader()
        writer.writerow(
            {
                name: formula_safe_cell(value) if isinstance(value, str) else value
                for name, value in row.items()
            }
        )
    return buffer.getvalue()


# ---- the dashboard's application: Dash makes the pages, plain routes carry what changes ----------


def make_app(hub: Hub, *, token: str, port: int, loopback: bool = True) -> Any:
    """The ASGI application."""
    app = Dash(
        __name__,
        backend="fastapi",
        title="zeromon",
        update_title=None,
        serve_locally=True,
        # Pages come and go, and callbacks name components that the first layout lacks
        suppress_callback_exceptions=True,
        compress=False,
        enable_mcp=False,
        assets_folder=str(Path(__file__).parent / "assets"),
    )
    app.index_string = app.index_string.replace("<html>", '<html lang="en">')
    feeds = Feeds(hub)
    app.layout = page_frame
    for route in list(app.server.routes):  # the pages of FastAPI that describe it
        if route.path.startswith(("/docs", "/redoc", "/openapi")):
            app.server.routes.remove(route)
    app.server.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=4)
    add_callbacks(app, feeds)
    add_routes(app.server, feeds)
    app.backend.websocket_capability = False  # else every tab keeps trying to open a web socket
    # without this call, Dash serves the very first page without our scripts
    app._setup_server()
    hashes = app.csp_hashes()
    return Guard(
        app.server, token=token, loopback=loopback, port=port, hashes=hashes,
        has=lambda path, query: hub.has(parse_route(path, query)),
    )  # fmt: skip
