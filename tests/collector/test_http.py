"""The collector's HTTP server: who may read, who may start a trace, and on which port it listens."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from builders import rank, run
from served import Fixed, get
from support import wait_for

from zeromon.base.errors import CaptureRefused, CollectorError, TrialRefused
from zeromon.collector import http
from zeromon.collector.http import start_http_server
from zeromon.ring.tokens import READ, request_proof_headers
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.step import Capture
from zeromon.sources import live


class Tracing(Fixed):
    """A view that takes requests for traces."""

    def __init__(self, *runs: RunSnapshot) -> None:
        super().__init__(*runs)
        self.asked: list[tuple[str, int, tuple[int, ...]]] = []

    def trace(self, name: str, steps: int, ranks: list[int]) -> Capture:
        if steps > 100:
            raise CaptureRefused("too many", "Ask for fewer.")
        self.asked.append((name, steps, tuple(ranks)))
        return Capture(number=7, state="waiting", first=12, steps=steps, ranks=(0,), folder="/f")


def post(port: int, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{port}{path}"
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_trace_is_asked_for_with_the_key_only() -> None:
    """Also on loopback: a web page, or another user of the machine, must not start one."""
    view = Tracing(run(rank(0)))
    server = start_http_server(view, "127.0.0.1", 0, "secret")
    port, good = server.server_port, {"Authorization": "Bearer secret"}
    body = json.dumps({"run": "train-1", "steps": 3, "ranks": [0]}).encode()
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "secre\u0301t".encode().decode("latin-1")},
    ):
        assert post(port, "/api/trace", body, **headers)[0] == 401
    assert view.asked == []
    assert post(port, "/api/trace", body, **good | {"Host": "evil.example"})[0] == 403
    assert post(port, "/metrics", body, **good)[0] == 405
    for wrong in (b"", b"{", b'{"steps": 2}', b'{"run": 1}', b'{"run": "a", "ranks": ["0"]}', b"\xff"):
        status, said = post(port, "/api/trace", wrong, **good)
        assert (status, said["error"].startswith("not a request")) == (400, True), wrong
    status, said = post(port, "/api/trace", body, **good)
    assert (status, said["number"], said["first"]) == (202, 7, 12)
    assert view.asked == [("train-1", 3, (0,))]
    many = json.dumps({"run": "train-1", "steps": 101}).encode()
    status, said = post(port, "/api/trace", many, **good)
    assert (status, said) == (409, {"error": "too many", "hint": "Ask for fewer."})
    server.shutdown()


def test_a_change_is_tried_with_the_key_only() -> None:
    asked: list[Any] = []

    class Trying(Fixed):
        def try_change(self, name: str, rule: str, rounds: int) -> None:
            asked.append((name, rule, rounds))
            raise TrialRefused("not this one", "Another.")

        def renew_trial(self, name: str, number: int, *, go_on: bool) -> None:
            asked.append((name, number, go_on))
            raise TrialRefused("not this one", "Another.")

    server = start_http_server(Trying(run(rank(0))), "127.0.0.1", 0, "secret")
    port, good = server.server_port, {"Authorization": "Bearer secret"}
    body = json.dumps({"run": "train-1", "rule": "ZM606"}).encode()
    assert post(port, "/api/try", body)[0] == 401
    assert post(port, "/api/try", body, Authorization="Bearer wrong")[0] == 401
    assert post(port, "/api/try", body, **good | {"Origin": "http://evil.example"})[0] == 403
    assert post(port, "/api/try", b'{"rule": "ZM606"}', **good)[0] == 400
    assert asked == []
    refused = (409, {"error": "not this one", "hint": "Another."})
    assert post(port, "/api/try", body, **good) == refused
    more = json.dumps({"run": "train-1", "number": 3, "go_on": True}).encode()
    assert post(port, "/api/try", more, **good) == refused
    assert asked == [("train-1", "ZM606", 6), ("train-1", 3, True)]
    server.shutdown()


def test_an_empty_token_is_none() -> None:
    server = start_http_server(Tracing(run(rank(0))), "127.0.0.1", 0)
    body = json.dumps({"run": "train-1"}).encode()
    for sent in ("Bearer ", "Bearer", ""):
        assert post(server.server_port, "/api/trace", body, Authorization=sent)[0] == 401
    server.shutdown()


def test_a_public_address_needs_a_token_and_asks_for_it() -> None:
    """No token, no listening; a wrong one gets 401."""
    with pytest.raises(CollectorError):
        start_http_server(Fixed(), "0.0.0.0", 0)
    server = start_http_server(Fixed(run(rank(0))), "0.0.0.0", 0, token="secret")
    port = server.server_port
    assert get(port, "/metrics")[0] == 401, "this user's token is not the job's"
    assert get(port, "/metrics", Authorization="Bearer wrong")[0] == 401
    assert get(port, "/metrics", Authorization="Bearer secret")[0] == 200
    server.shutdown()


def test_a_web_page_elsewhere_cannot_read_the_api() -> None:
    """DNS rebinding: the Host header must be this machine's."""
    server = start_http_server(Fixed(run(rank(0))), "127.0.0.1", 0)
    assert get(server.server_port, "/api/runs", Host="evil.example:9417")[0] == 403
    assert get(server.server_port, "/api/runs", Origin="http://evil.example")[0] == 403
    assert get(server.server_port, "/api/runs")[0] == 200
    assert get(server.server_port, "/nothing")[0] == 404
    server.shutdown()


def test_a_taken_port_is_stepped_over_or_refused() -> None:
    """The next free one, unless exactly this one is wanted."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start_http_server(Fixed(), "127.0.0.1", port)
        assert server.server_port != port
        server.shutdown()
        with pytest.raises(CollectorError) as caught:
            start_http_server(Fixed(), "127.0.0.1", port, strict_port=True)
        assert "--port" in caught.value.hint


# ---- connections ----------------------------------------------------------------------------------


def opened(port: int) -> socket.socket:
    """A connection that begins a request and does not end it."""
    made = socket.create_connection(("127.0.0.1", port), timeout=5)
    made.sendall(b"GET /healthz HTTP/1.0\r\nX: ")
    return made


def test_many_slow_connections_leave_room_for_others(server_of_nothing: Any) -> None:
    port, before = server_of_nothing.server_port, threading.active_count()
    slow = [opened(port) for _ in range(150)]
    wait_for(lambda: threading.active_count() - before <= http._MAX_CONNECTIONS + 1)
    assert get(port, "/healthz")[0] == 200
    assert threading.active_count() - before <= http._MAX_CONNECTIONS + 1
    for one in slow:
        one.close()


def test_a_request_that_does_not_end_is_cut(
    server_of_nothing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header line every few seconds keeps each read within its timeout."""
    monkeypatch.setattr(http, "_CONNECTION_SECONDS", 0.2)
    with opened(server_of_nothing.server_port) as slow:
        slow.settimeout(10)
        while slow.recv(1000):
            pass


def test_where_all_usual_ports_are_taken_any_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_PORTS_TO_TRY", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_http_server(Fixed(), "127.0.0.1", port)
        assert server.server_port != port and get(server.server_port, "/healthz")[0] == 200
        server.shutdown()
        with pytest.raises(CollectorError, match="in use"):
            start_http_server(Fixed(), "127.0.0.1", port, strict_port=True)


@pytest.fixture
def server_of_nothing() -> Iterator[Any]:
    server = start_http_server(Fixed(), "127.0.0.1", 0)
    yield server
    server.shutdown()


def test_a_node_reads_another_by_a_proof_and_sends_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker reads collectors that the first one names; nobody can use what it sends."""
    server = start_http_server(Tracing(run(rank(0))), "127.0.0.1", 0, "cluster-secret")
    port, sent = server.server_port, list[tuple[str, dict[str, str]]]()
    request = live._HTTP.request

    def noted(url: str, *rest: Any, headers: dict[str, str], **more: Any) -> Any:
        sent.append((url.partition(str(port))[2], headers))
        return request(url, *rest, headers=headers, **more)

    monkeypatch.setattr(live._HTTP, "request", noted)
    monkeypatch.setenv("ZEROMON_TOKEN", "cluster-secret")
    source = live.LiveSource(f"127.0.0.1:{port}", "train-1", signs=True)
    for _ in range(2):
        assert source.latest().run == "train-1"
    assert "?since=" in sent[1][0]
    assert not [one for one in sent if "cluster-secret" in str(one) or "Authorization" in one[1]]
    for path, headers in sent:
        assert get(port, path, Authorization="", **headers)[0] == 401, "a replay"
    proof = request_proof_headers("cluster-secret", READ, b"/api/runs?")
    assert get(port, "/api/runs/train-1", **proof)[0] == 401, "another path"
    proof = request_proof_headers("cluster-secret", READ, b"/api/trace?")
    body = json.dumps({"run": "train-1"}).encode()
    assert post(port, "/api/trace", body, **proof)[0] == 401, "an action"
    assert get(port, "/api/runs", **request_proof_headers("other", READ, b"/api/runs?"))[0] == 401
    assert (
        get(port, "/api/runs", **request_proof_headers("cluster-secret", READ, b"/api/runs?"))[0] == 200
    )
    server.shutdown()
