"""HTTP: ``/metrics`` for Prometheus and ``/api`` for the views, both from the same frozen picture.

``POST /api/trace`` with ``{"run": ..., "steps": 2, "ranks": [0]}`` asks the live ranks for a trace. It
is the one request that does something, so it needs a token also on loopback: ``ZEROMON_TOKEN``, or the
key in the collector's file, which only its user can read.

``/sd`` lists the collectors of all nodes of the live runs for Prometheus's HTTP service discovery, and
``POST /api/exchange`` is what these collectors tell each other (:mod:`zeromon.nodes`).

It binds to loopback; any other address needs a token. On loopback the Host header must name this
machine, so that a web page elsewhere cannot read the API through the user's browser.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec

from zeromon.errors import CollectorError, RunNotFound, ZeromonError
from zeromon.exposition import Exposition
from zeromon.nodes import Card
from zeromon.record import Past
from zeromon.snapshot import Capture, Health, RunSnapshot
from zeromon.store import encode

Respond = Callable[[str, list[tuple[str, str]]], Any]
Environ = dict[str, Any]
Asked = dict[str, list[str]]
"""The parameters of a request."""

_PORTS_TO_TRY = 20
_MOST_BODY = 1 << 16
_MOST_REPORT = 1 << 23
_ACTIONS = ("/api/trace", "/api/exchange")


class _Trace(msgspec.Struct):
    """What ``POST /api/trace`` takes."""

    run: str
    steps: int = 2
    ranks: list[int] = []


_TRACE = msgspec.json.Decoder(_Trace)
_ENCODER = msgspec.json.Encoder()


class View(Protocol):
    """What the server shows: the collector, or a test's stand-in with a fixed picture."""

    @property
    def view(self) -> tuple[RunSnapshot, ...]:
        """The runs now."""

    @property
    def health(self) -> Health | None:
        """Their collector; None of a stand-in."""

    def was_read(self) -> None:
        """Somebody has read the picture."""

    def past(self, name: str) -> Past:
        """The record of a run."""

    def trace(self, name: str, steps: int, ranks: Sequence[int]) -> Capture:
        """Asks the live ranks of a run for a trace; raises :class:`CaptureRefused`."""

    def exchange(self, body: bytes) -> bytes:
        """Answers another node; raises a ValueError for what is no report, and RunNotFound."""

    def targets(self) -> list[Card]:
        """The collectors of all nodes of all live runs."""


class Application:
    """The WSGI application."""

    def __init__(
        self, view: View, token: str = "", *, any_host: bool = False, key: str = ""
    ) -> None:
        self._metrics = Exposition(view)
        self._view = view
        self._token = token
        self._key = key or token
        self._any_host = any_host

    def __call__(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        """Answers one request."""
        refusal = self._refusal(environ)
        if refusal:
            return _answer(respond, refusal, {"error": refusal.partition(" ")[2]})
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") == "POST":
            act = self._exchange if path == "/api/exchange" else self._trace
            return act(environ, respond)
        if path == "/sd":
            here = environ.get("HTTP_HOST", "")
            return _answer(respond, "200 OK", targets(self._view.targets(), self._view.view, here))
        if path == "/metrics":
            self._view.was_read()
            headers, body = self._metrics.answer(
                environ.get("HTTP_ACCEPT", ""), environ.get("HTTP_ACCEPT_ENCODING", "")
            )
            respond("200 OK", headers)
            return [body]
        if path in ("/", "/healthz"):
            return _answer(respond, "200 OK", {"zeromon": "ok", "see": ["/metrics", "/api/runs"]})
        if path == "/api/runs":
            return _answer(respond, "200 OK", [_brief(run) for run in self._view.view])
        if path.startswith("/api/runs/"):
            name, _, what = path.removeprefix("/api/runs/").partition("/")
            return self._run(unquote(name), what, environ, respond)
        return _answer(respond, "404 Not Found", {"error": f"nothing at {path}"})

    def _run(self, name: str, what: str, environ: Environ, respond: Respond) -> Iterable[bytes]:
        self._view.was_read()
        run = next((run for run in self._view.view if name in (run.run, run.alias)), None)
        if run is None:
            return _answer(respond, "404 Not Found", {"error": f"no run {name}"})
        try:
            asked = parse_qs(environ.get("QUERY_STRING", ""))
            body = self._past(run, what, asked) if what else encode(_since(run, asked))
        except RunNotFound as error:
            return _answer(respond, "404 Not Found", {"error": str(error)})
        except (ValueError, OverflowError) as error:
            return _answer(respond, "400 Bad Request", {"error": f"not a request: {error}"})
        except (OSError, ZeromonError, ImportError) as error:
            return _answer(respond, "500 Internal Server Error", {"error": str(error)})
        respond("200 OK", _headers(body))
        return [body]

    def _past(self, run: RunSnapshot, what: str, asked: Asked) -> bytes:
        past = self._view.past(run.run)
        if what == "span":
            return _ENCODER.encode(past.span())
        if what == "at":
            return encode(past.at(float(asked.get("wall", ["none given"])[0])))
        if what == "findings":
            return _ENCODER.encode(past.findings())
        if what == "series":
            numbers = {name: [int(value) for value in values] for name, values in asked.items()}
            return _ENCODER.encode(
                past.series(
                    numbers.get("since", [0])[0],
                    numbers.get("until", [None])[0],
                    numbers.get("rank", []),
                    numbers.get("most", [600])[0],
                )
            )
        raise RunNotFound(f"nothing at {what}")

    def _trace(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        try:
            size = min(_MOST_BODY, _size_of(environ))
            asked = _TRACE.decode(environ["wsgi.input"].read(size))
        except (ValueError, msgspec.DecodeError) as error:
            return _answer(respond, "400 Bad Request", {"error": f"not a request: {error}"})
        try:
            made = self._view.trace(asked.run, asked.steps, asked.ranks)
        except ZeromonError as error:
            return _answer(respond, "409 Conflict", {"error": str(error), "hint": error.hint})
        return _answer(respond, "202 Accepted", msgspec.to_builtins(made))

    def _exchange(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        size = _size_of(environ)
        if size > _MOST_REPORT:
            return _answer(respond, "413 Content Too Large", {"error": "too long a report"})
        try:
            body = self._view.exchange(environ["wsgi.input"].read(size))
        except RunNotFound as error:
            return _answer(respond, "404 Not Found", {"error": str(error)})
        except ValueError as error:
            return _answer(respond, "400 Bad Request", {"error": f"not a report: {error}"})
        respond("200 OK", _headers(body))
        return [body]

    def _refusal(self, environ: Environ) -> str:
        method, path = environ.get("REQUEST_METHOD"), environ.get("PATH_INFO")
        if method not in ("GET", "HEAD") and not (method == "POST" and path in _ACTIONS):
            return "405 Method Not Allowed"
        needed = self._key if method == "POST" else self._token
        if needed or method == "POST":
            given = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
            if not needed or not hmac.compare_digest(given.encode(), needed.encode()):
                return "401 Unauthorized"
        host = environ.get("HTTP_HOST", "").rpartition(":")[0] or environ.get("HTTP_HOST", "")
        if not self._any_host and host not in ("127.0.0.1", "localhost", "[::1]", "::1"):
            return "403 Forbidden"
        return ""


def targets(cards: Iterable[Card], runs: Iterable[RunSnapshot], here: str) -> list[dict[str, Any]]:
    """Prometheus's HTTP service discovery: a group a node and run.

    *here*: where this collector was reached, for the runs that have no other node.
    """
    groups = [
        (card.address, card.run, card.node, card.first_rank, card.ranks)
        for card in cards
        if card.address
    ]
    spread = {run for _, run, *_ in groups}
    groups += [
        (here, run.run, run.node, run.ranks[0].rank, len(run.ranks))
        for run in runs
        if run.run not in spread and run.ranks and not run.ended
    ]
    if not groups:
        groups.append((here, "", socket.gethostname(), 0, 0))
    return [
        {
            "targets": [address],
            "labels": {
                "__meta_zeromon_run": run,
                "__meta_zeromon_node": node,
                "__meta_zeromon_ranks": f"{first}-{first + ranks - 1}" if ranks else "",
            },
        }
        for address, run, node, first, ranks in groups
    ]


def _since(run: RunSnapshot, asked: Asked) -> RunSnapshot:
    """*run* with those of its last steps that began at ``since``, ns, or later: the others are known."""
    since = int(asked.get("since", ["0"])[0])
    if not since:
        return run
    ranks = [
        replace(rank, recent=tuple(step for step in rank.recent if step.start_ns >= since))
        for rank in run.ranks
    ]
    return replace(run, ranks=tuple(ranks))


def _brief(run: RunSnapshot) -> dict[str, Any]:
    return {
        "run": run.run,
        "ended": run.ended,
        "ranks": len(run.ranks),
        "pids": [rank.pid for rank in run.ranks],
        "steps": max((rank.steps for rank in run.ranks), default=0),
        "started": run.started_wall,
        "command": list(run.command),
    }


def _size_of(environ: Environ) -> int:
    """Of a request's body; 0 where it is not said."""
    said = environ.get("CONTENT_LENGTH") or "0"
    return int(said) if said.isdigit() else 0


def _headers(body: bytes) -> list[tuple[str, str]]:
    return [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]


def _answer(respond: Respond, status: str, content: Any) -> list[bytes]:
    body = json.dumps(content).encode()
    respond(status, _headers(body))
    return [body]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True


class _QuietHandler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the collector has no terminal."""


def start_server(
    view: View,
    host: str,
    port: int,
    token: str = "",
    *,
    strict_port: bool = False,
    key: str = "",
) -> WSGIServer:
    """Serves *view* from a thread of its own. *key*: what a POST needs where there is no token.

    A port that is taken is stepped over to the next free one unless *strict_port*. Raises
    :class:`CollectorError` when there is none, or for a non-loopback address without a token.
    """
    loopback = host == "localhost" or _is_loopback(host)
    if not loopback and not token:
        raise CollectorError(
            f"refusing to listen on {host} without a token",
            "Set ZEROMON_TOKEN, or listen on 127.0.0.1 and forward the port over ssh.",
        )
    application = Application(view, token, any_host=not loopback, key=key)
    candidates = [port] if strict_port or port == 0 else range(port, port + _PORTS_TO_TRY)
    for candidate in candidates:
        try:
            server = make_server(host, candidate, application, _Server, _QuietHandler)
        except (OSError, OverflowError):
            continue
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        return server
    raise CollectorError(f"port {port} of {host} is taken")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
