"""Opens the dashboard in the browser: live and recorded runs, their past, and runs side by side.

With --prometheus URL the dashboard shows the runs that a Prometheus server knows (or VictoriaMetrics,
Mimir, Thanos), with any number of nodes and ranks; ZEROMON_PROMETHEUS_TOKEN is sent as a bearer token.

--replay opens the page of RUN (default: the newest run) at its first snapshot; the bar at the bottom
plays the record, at the speed that it shows.

Without RUN the dashboard opens the list of all runs. It listens on this machine only. To reach it from
another machine, forward the port over ssh, or set --host. Open the address that is printed: every
request needs its key, which becomes a cookie.
"""

import argparse
import html
import os
import socket
import sys
import tempfile
import threading
import webbrowser
from pathlib import Path
from typing import Any
from urllib.parse import quote

from zeromon.base.errors import CollectorError
from zeromon.cli.parser import add_flag, add_server, import_extra, tcp_port
from zeromon.ring.tokens import server_token
from zeromon.sources.access import is_loopback_host
from zeromon.sources.prometheus.client import Server, chosen_server
from zeromon.sources.prometheus.source import runs_of
from zeromon.sources.replay import ReplaySource

DEFAULT_PORT = 9418
_PORTS_TO_TRY = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon dash [RUN] [--replay | --prometheus URL] [--host H] [--port P] [--no-browser]``"""
    parser.add_argument("run", nargs="?", help="run id or its beginning: open this run")
    modes = parser.add_mutually_exclusive_group()
    add_flag(modes, "--replay", "open the first snapshot of RUN, and play from there")
    add_server(modes)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument(
        "--port",
        type=tcp_port,
        help=f"port to listen on (default: {DEFAULT_PORT}, or the next free port)",
    )
    add_flag(parser, "--no-browser", "only print the address")


def call(options: argparse.Namespace) -> int:
    """Serves the dashboard until Ctrl-C."""
    if options.replay:
        source = ReplaySource(options.run)
        return _serve_dashboard(options, source.run, source.playback.begin)
    server = chosen_server(options.prometheus)
    if server is not None:
        runs_of(server)  # raises where nothing answers
    return _serve_dashboard(options, options.run, server=server)


def _serve_dashboard(
    options: argparse.Namespace, run: str | None, at: float | None = None, server: Server | None = None
) -> int:
    """Serves the dashboard and opens it on *run*, at the moment *at* (seconds since the epoch)."""
    app_module, access, hub_module, uvicorn = (
        import_extra(name, "the dashboard", "dashboard")
        for name in (
            "zeromon_dashboard.routes", "zeromon_dashboard.access", "zeromon_dashboard.hub", "uvicorn",
        )
    )  # fmt: skip
    loopback = is_loopback_host(options.host)
    token = server_token()
    # Bound here and not by uvicorn: the keys of address and cookie are derived for the port
    listening = open_listening_socket(options.host, options.port)
    number = listening.getsockname()[1]
    hub = hub_module.Hub(server=server)
    start = f"/run/{quote(resolve_run_name(hub, run))}/overview?" if run else "/?"
    start += f"at={at:.3f}&" if at is not None else ""
    app = app_module.make_app(hub, token=token, port=number, loopback=loopback)
    host = f"[{options.host}]" if ":" in options.host else options.host
    key = access.address_key(token, number)
    address = f"http://{'127.0.0.1' if loopback else host}:{number}{start}token={key}"
    sys.stderr.write(f"zeromon: the dashboard is at {address}\n")
    # Without a display, webbrowser starts lynx or w3m in this terminal
    if not options.no_browser and loopback and (os.environ.get("DISPLAY") or sys.platform == "darwin"):
        # A NamedTemporaryFile without a reference is deleted before the browser reads it
        page = make_opening_page(address)
        # From a thread, as the server below does not return
        threading.Timer(0.5, webbrowser.open, (Path(page.name).as_uri(),)).start()
    # Without a limit, Ctrl-C waits for requests that are still being answered
    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listening])
    return 0


def make_opening_page(address: str) -> Any:
    """Returns a private file that leads a browser to *address*, and is deleted when it is closed.

    Everybody on the machine sees the arguments of a browser, and *address* has a key.
    """
    page = tempfile.NamedTemporaryFile("w", prefix="zeromon-", suffix=".html")  # noqa: SIM115
    page.write(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">')
    page.flush()
    return page


def resolve_run_name(hub: Any, name: str) -> str:
    """The full name of the run whose name begins with *name*; raises ``RunNotFound``."""
    live = [item.manifest.run for item in hub.runs() if item.manifest.run.startswith(name)]
    return str(live[0] if len(live) == 1 else hub.store.resolve(name))


def open_listening_socket(host: str, port: int | None) -> socket.socket:
    """A socket that listens on *port*, or without one on the first free port from the default on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TO_TRY):
        listener = socket.socket(family)
        # Without this, a restart fails for a minute while old connections are in TIME_WAIT
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
        # bind raises OverflowError for a port above 65535, which zeromon mcp --port does not check
        except (OSError, OverflowError):
            listener.close()
            continue
        listener.listen(128)
        return listener
    raise CollectorError(
        f"port {port or DEFAULT_PORT} of {host} is in use", "Choose another with --port."
    )
