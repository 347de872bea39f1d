"""The dashboard's application: Dash makes the pages, plain routes carry what changes."""

from pathlib import Path
from typing import Any

from dash import Dash
from fastapi.middleware.gzip import GZipMiddleware

from zeromon_dashboard.access import Guard
from zeromon_dashboard.callbacks import add_callbacks
from zeromon_dashboard.feed import Feeds
from zeromon_dashboard.hub import Hub
from zeromon_dashboard.layout import page_frame
from zeromon_dashboard.routes import add_routes
from zeromon_dashboard.url_state import parse_route


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
