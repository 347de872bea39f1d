"""The collector's HTTP server: ``/metrics`` for Prometheus and ``/api`` for the views.

``POST /api/trace`` with ``{"run": ..., "steps": 2, "ranks": [0]}`` requests a trace from the live ranks.
``POST /api/try`` with ``{"run": ..., "rule": ...}`` tries a finding's change in the live ranks, and with
``{"run": ..., "number": ..., "go_on": ...}`` lets it go on or ends it.
Every request needs a token, also on loopback (:mod:`zeromon.ring.tokens`); ``/healthz`` alone does not.

``/sd`` lists the collectors of all nodes of the live runs for Prometheus's HTTP service discovery.
``POST /api/exchange`` synchronizes these collectors (:mod:`zeromon.collector.cluster`); the token signs
each report and is in none.

The server binds to loopback; any other address needs ``ZEROMON_TOKEN``. :mod:`zeromon.sources.access`
defines which requests the server refuses.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, unquote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec

from zeromon.base.errors import CollectorError, RunNotFound, ZeromonError
from zeromon.collector.cluster import NodeInfo
from zeromon.collector.cluster_client import reply_signature
from zeromon.collector.daemon import Collector
from zeromon.collector.requests import DEFAULT_ROUNDS
from zeromon.export.prometheus.metrics import Exposition
from zeromon.ring import tokens
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.finding import Trial
from zeromon.snapshot.step import Capture
from zeromon.sources import access
from zeromon.storage.run_store import StepQuery, encode_snapshot
from zeromon.storage.snapshot_log import Past

Respond = Callable[[str, list[tuple[str, str]]], Any]
Environ = dict[str, Any]
Query = dict[str, list[str]]
"""The parameters of a query."""
_LIST_FIELDS = ("ranks", "steps")
"""The fields of a :class:`StepQuery` that are no single number."""
Handler = Callable[[Environ, Respond], Iterable[bytes]]

_PORTS_TO_TRY = 20
_MAX_CONNECTIONS = 64
_CONNECTION_SECONDS = 30.0
_MAX_BODY_BYTES = 1 << 16
_MAX_REPORT_BYTES = 1 << 23
_VARIABLE = {
    name: f"HTTP_{name.upper().replace('-', '_')}"
    for name in (tokens.TIME, tokens.NONCE, tokens.SIGNATURE)
}
"""Name of a report's header -> its name in WSGI."""
_ALIVE, _RUN = "/healthz", "/api/runs/"
_INDEX = {"zeromon": "ok", "see": ["/metrics", "/api/runs"]}


class _Trace(msgspec.Struct):
    """The body of ``POST /api/trace``."""

    run: str
    steps: int = 2
    ranks: list[int] = []


class _Try(msgspec.Struct):
    """The body of ``POST /api/try``: a *rule* to try, or the *number* of a trial to renew or end."""

    run: str
    rule: str = ""
    rounds: int = DEFAULT_ROUNDS
    number: int = 0
    go_on: bool = False


_TRY = msgspec.json.Decoder(_Try)
_TRACE = msgspec.json.Decoder(_Trace)
_ENCODER = msgspec.json.Encoder()


class Application:
    """The WSGI application."""

    def __init__(self, view: Collector, token: str = "", *, any_host: bool = False) -> None:
        """*token*: the job's, which signs reports; without it requests need the user's."""
        self._token, self._nonces = token, tokens.Nonces()
        self._metrics = Exposition()
        self._view = view
        self._gets: dict[str, Handler] = {
            "/": lambda _, respond: _send_json(respond, "200 OK", _INDEX),
            _ALIVE: lambda _, respond: _send_json(respond, "200 OK", {"zeromon": "ok"}),
            "/sd": self._answer_targets,
            "/metrics": self._answer_metrics,
            "/api/runs": self._runs,
        }
        self._posts: dict[str, Handler] = {
            "/api/trace": lambda environ, reply: self._start_action(environ, reply, self._start_capture),
            "/api/try": lambda environ, respond: self._start_action(environ, respond, self._try),
            "/api/exchange": self._exchange_report,
        }
        self._policy = access.Policy(
            loopback=not any_host,
            token=token or tokens.user_token(),
            token_hint="send the collector's token as Authorization: Bearer TOKEN",
            actions=tuple(self._posts),
            read_methods=("GET", "HEAD"),
            most_body=_MAX_REPORT_BYTES,
            signed=("/api/exchange",),
            open=(_ALIVE,),
        )

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of everything that it answers; ``{run}`` stands for the name of a run."""
        suffixes = ("", *(f"/{section}" for section in _SECTIONS))
        return [
            *(("GET", path) for path in (*self._gets, *(f"{_RUN}{{run}}{tail}" for tail in suffixes))),
            *(("POST", path) for path in self._posts),
        ]

    def __call__(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        """Answers one request, as WSGI defines it."""
        request = access.Request(
            method=str(environ.get("REQUEST_METHOD", "")),
            path=str(environ.get("PATH_INFO", "")),
            host=environ.get("HTTP_HOST", ""),
            origin=environ.get("HTTP_ORIGIN", ""),
            token=environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer "),
            length=access.parse_body_length(environ.get("CONTENT_LENGTH") or "0"),
        )
        token = self._policy.token
        # GET only: the signature covers no body, so the proof of a read must not open an action
        target = f"{environ.get('PATH_INFO', '')}?{environ.get('QUERY_STRING', '')}".encode()
        if request.method == "GET" and self._is_proved(environ, tokens.READ, target, token):
            request = replace(request, token=token)
        refused = access.refusal_of(request, self._policy)
        if refused is not None:
            status = f"{refused.status} {HTTPStatus(refused.status).phrase}"
            return _send_json(respond, status, {"error": refused.reason})
        path = request.path or "/"
        handler = (self._posts if request.method == "POST" else self._gets).get(path)
        if handler is not None:
            return handler(environ, respond)
        if path.startswith(_RUN):
            name, _, section = path.removeprefix(_RUN).partition("/")
            return self._run(unquote(name), section, environ, respond)
        return _send_json(respond, "404 Not Found", {"error": f"nothing at {path}"})

    def _answer_targets(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "")
        return _send_json(respond, "200 OK", target_groups(self._view.targets(), self._view.view, host))

    def _answer_metrics(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        self._view.was_read("prometheus")
        accepted = environ.get("HTTP_ACCEPT", ""), environ.get("HTTP_ACCEPT_ENCODING", "")
        headers, body = self._metrics.answer(self._view.view, self._view.health, *accepted)
        respond("200 OK", headers)
        return [body]

    def _runs(self, _: Environ, respond: Respond) -> Iterable[bytes]:
        return _send_json(respond, "200 OK", [_summarize_run(run) for run in self._view.view])

    def _is_proved(self, environ: Environ, kind: bytes, content: bytes, token: str) -> bool:
        """Returns whether the request is signed with *token* over its *content*."""
        headers = {name: environ.get(_VARIABLE[name], "") for name in _VARIABLE}
        return tokens.is_request_proved(headers, kind, content, token, self._nonces)

    def _run(self, name: str, section: str, environ: Environ, respond: Respond) -> Iterable[bytes]:
        self._view.was_read()
        run = next((run for run in self._view.view if name in (run.run, run.alias)), None)
        if run is None:
            return _send_json(respond, "404 Not Found", {"error": f"no run {name}"})
        try:
            query = parse_qs(environ.get("QUERY_STRING", ""))
            body = (
                self._past(run, section, query) if section else encode_snapshot(_steps_since(run, query))
            )
        except RunNotFound as error:
            return _send_json(respond, "404 Not Found", {"error": str(error)})
        except (ValueError, OverflowError, RecursionError) as error:
            return _send_json(respond, "400 Bad Request", {"error": f"not a request: {error}"})
        except (OSError, ZeromonError, ImportError) as error:
            return _send_json(respond, "500 Internal Server Error", {"error": str(error)})
        respond("200 OK", _json_headers(body))
        return [body]

    def _past(self, run: RunSnapshot, section: str, query: Query) -> bytes:
        if section not in _SECTIONS:
            raise RunNotFound(f"nothing at {section}")
        return _SECTIONS[section](self._view.past(run.run), query)

    def _start_action(
        self, environ: Environ, respond: Respond, act: Callable[[bytes], Capture | Trial]
    ) -> Iterable[bytes]:
        """Answers a request that changes what the ranks do."""
        try:
            # The policy's limit is that of reports: without this one, an action may send 8 MiB
            accepted = act(environ["wsgi.input"].read(min(_MAX_BODY_BYTES, _request_body_size(environ))))
        except (ValueError, RecursionError) as error:
            return _send_json(respond, "400 Bad Request", {"error": f"not a request: {error}"})
        except ZeromonError as error:
            return _send_json(respond, "409 Conflict", {"error": str(error), "hint": error.hint})
        return _send_json(respond, "202 Accepted", msgspec.to_builtins(accepted))

    def _start_capture(self, body: bytes) -> Capture:
        request = _TRACE.decode(body)
        return self._view.trace(request.run, request.steps, request.ranks)

    def _try(self, body: bytes) -> Trial:
        request = _TRY.decode(body)
        if request.number:
            return self._view.renew_trial(request.run, request.number, go_on=request.go_on)
        return self._view.try_change(request.run, request.rule, request.rounds)

    def _exchange_report(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        # By its length: wsgi.input is the socket, which ends only when the client closes it
        report = environ["wsgi.input"].read(_request_body_size(environ))
        if not self._is_proved(environ, tokens.REPORT, report, self._token):
            reason = "the report is not signed with this collector's token, or is not of this minute"
            return _send_json(respond, "401 Unauthorized", {"error": reason})
        try:
            body = self._view.exchange(report)
        except RunNotFound as error:
            return _send_json(respond, "404 Not Found", {"error": str(error)})
        except ValueError as error:
            return _send_json(respond, "400 Bad Request", {"error": f"not a report: {error}"})
        proof = reply_signature(self._token, environ[_VARIABLE[tokens.NONCE]], body)
        respond("200 OK", [*_json_headers(body), (tokens.SIGNATURE, proof)])
        return [body]


def _encode_lanes(past: Past, query: Query) -> bytes:
    ranks = [int(rank) for rank in query.get("rank", ())]
    return _ENCODER.encode(past.lanes(int(query.get("steps", ["1"])[0]), ranks))


def _encode_series(past: Past, query: Query) -> bytes:
    fields = {name: params if name in _LIST_FIELDS else params[0] for name, params in query.items()}
    step_query = msgspec.convert(fields, StepQuery, strict=False)
    if step_query.most < 1:
        raise ValueError("most is at least 1")
    return _ENCODER.encode(past.series(step_query))


_SECTIONS: dict[str, Callable[[Past, Query], bytes]] = {
    "span": lambda past, _: _ENCODER.encode(past.span()),
    "at": lambda past, query: encode_snapshot(past.at(float(query.get("wall", ["none given"])[0]))),
    "findings": lambda past, _: _ENCODER.encode(past.findings()),
    "lanes": _encode_lanes,
    "series": _encode_series,
}
"""The name in a path and the method that answers it from a run's record."""


def target_groups(
    cards: Iterable[NodeInfo], runs: Iterable[RunSnapshot], own_address: str
) -> list[dict[str, Any]]:
    """Returns target groups for Prometheus's HTTP service discovery, one per node and run.

    *own_address*: the address of this collector, for the runs that have no other node.
    """
    groups = [
        (card.address, card.run, card.node, card.first_rank, card.ranks)
        for card in cards
        if card.address
    ]
    spread = {run for _, run, *_ in groups}
    groups += [
        (own_address, run.run, run.node, run.ranks[0].rank, len(run.ranks))
        for run in runs
        if run.run not in spread and run.ranks and not run.ended
    ]
    if not groups:
        groups.append((own_address, "", socket.gethostname(), 0, 0))
    return [
        {
            "targets": [address],
            "labels": {
                "__meta_zeromon_run": run,
                "__meta_zeromon_node": node,
                "__meta_zeromon_ranks": f"{first_rank}-{first_rank + ranks - 1}" if ranks else "",
            },
        }
        for address, run, node, first_rank, ranks in groups
    ]


def _steps_since(run: RunSnapshot, query: Query) -> RunSnapshot:
    """Returns *run* without the recent steps that began before ``since``, ns, which the client has."""
    since_ns = int(query.get("since", ["0"])[0])
    if not since_ns:
        return run
    ranks = [
        rank.with_recent(step for step in rank.steps.recent if step.start_ns >= since_ns)
        for rank in run.ranks
    ]
    return replace(run, ranks=tuple(ranks))


def _summarize_run(run: RunSnapshot) -> dict[str, Any]:
    return {
        "run": run.run,
        "ended": run.ended,
        "detached": run.detached,
        "ranks": len(run.ranks),
        "pids": [rank.pid for rank in run.ranks],
        "step": run.last_step,
        "started": run.started_wall,
        "command": list(run.command),
    }


def _request_body_size(environ: Environ) -> int:
    """Returns the size of a request's body, bytes; 0 where the header is absent."""
    return access.parse_body_length(environ.get("CONTENT_LENGTH") or "0") or 0


def _json_headers(body: bytes) -> list[tuple[str, str]]:
    return [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]


def _send_json(respond: Respond, status: str, content: Any) -> list[bytes]:
    body = json.dumps(content).encode()
    respond(status, _json_headers(body))
    return [body]


class _Server(ThreadingMixIn, WSGIServer):
    """Has a bounded number of connections, each for a bounded time."""

    # Without it, the exit of the collector waits for clients that do not read their answer
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._opened: dict[Any, float] = {}
        """Connection -> when it was accepted, the oldest first."""

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own; the oldest connection ends when there are too many."""
        connections = list(self._opened)
        for connection in connections[: len(connections) - _MAX_CONNECTIONS + 1]:
            _cut_connection(connection)
            self._opened.pop(connection, None)
        self._opened[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection that was answered."""
        self._opened.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends connections that have not sent their request in time."""
        now_seconds = time.monotonic()
        # A copy: threads that have answered remove their connection meanwhile
        for request, accepted_at in list(self._opened.items()):
            if now_seconds - accepted_at > _CONNECTION_SECONDS:
                _cut_connection(request)
                self._opened.pop(request, None)


def _cut_connection(connection: socket.socket) -> None:
    """Ends a connection whose thread may be waiting for it."""
    # Not close(): that does not wake a thread that is blocked in recv
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _QuietHandler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: the collector has no terminal."""


def start_http_server(
    view: Collector, host: str, port: int, token: str = "", *, strict_port: bool = False
) -> WSGIServer:
    """Serves *view* from a thread of its own. *token*: the job's; without it the user's is needed.

    Takes one of the next ports where *port* is in use, else any, unless *strict_port*. Raises
    :class:`CollectorError` without a free port, and for a non-loopback address without a token.
    """
    loopback = access.check_loopback_only(host, token)
    application = Application(view, token, any_host=not loopback)
    candidates = [port] if strict_port or port == 0 else [*range(port, port + _PORTS_TO_TRY), 0]
    for candidate in candidates:
        try:
            server = make_server(host, candidate, application, _Server, _QuietHandler)
        # bind() raises OverflowError for a port above 65535
        except (OSError, OverflowError):
            continue
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        return server
    raise CollectorError(f"port {port} of {host} is in use")
