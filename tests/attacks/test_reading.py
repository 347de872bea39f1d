"""Attacks on every server: who may read, paths that lead elsewhere, broken, slow and many requests."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from builders import rank, run
from served import get
from support import FORKED, ROOT, Node, clean_environment, wait_for

from zeromon.cli.dash import open_listening_socket
from zeromon.cli.mcp import build_asgi_application, build_mcp_server as assistant_server
from zeromon.ring.masking import MASK
from zeromon.ring.tokens import READ, request_proof_headers, user_token, user_token_file
from zeromon.sources.access import COOKIE, derive_server_key
from zeromon.sources.live import runs_at_address
from zeromon_dashboard.access import address_key, server_name
from zeromon_dashboard.hub import Hub
from zeromon_dashboard.routes import make_app

NOBODY = 65534
RUN = "private-run"
TOKEN = "t0ken-of-the-job"
OPEN = {("collector", "/healthz")}
"""What everybody may read: that a collector lives."""

CLIENT = """
import encodings.idna, http.client, json, os, sys
user = int(sys.argv[1])
if user != os.getuid():
    os.setgroups([]); os.setgid(user); os.setuid(user)
answers = []
for port, method, path, headers in json.load(sys.stdin):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = "{}" if method == "POST" else None
    connection.request(method, path, body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    answers.append([answer.status, answer.read(1 << 20).decode("latin-1")])
    connection.close()
print(json.dumps(answers))
"""
"""Asks as the user with that number; answers with status and content."""


@dataclass
class Serving:
    """A server, its routes, and what opens it."""

    port: int
    routes: list[tuple[str, str]]


def filled(path: str) -> str:
    """A path of a route's table with names in it."""
    return re.sub(r"\{[^}]*\}", "x", path.replace("{run}", RUN))


def of_table(routes: Any) -> list[tuple[str, str]]:
    """Method and path of each route of an ASGI application, of those that are mounted, too."""
    found = []
    for route in routes:
        path = getattr(route, "path", "") or "/"
        methods = getattr(route, "methods", None) or {"GET"}
        found += [(method, path) for method in sorted(methods)]
    return found


def in_thread(app: Any, port: int | None) -> Iterator[int]:
    """Serves an ASGI application; yields its port."""
    listening = open_listening_socket("127.0.0.1", port)
    serving = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    serving.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Serving]]:
    """All servers of zeromon, each with a private run, as a user without ZEROMON_TOKEN starts them."""
    folder = tmp_path_factory.mktemp("servers")
    node = Node(folder)
    node.store.save(run(rank(0), run=RUN, ended=True))
    node.collector.view = (run(rank(0), run=RUN),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROMON_DIR", str(folder / "rings"))
        patch.setenv("ZEROMON_STORE", str(folder / "store"))
        patch.delenv("ZEROMON_TOKEN", raising=False)
        found = {"collector": Serving(node.server.server_port, node.server.get_app().routes)}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        dashboard = make_app(Hub(node.store), token=user_token(), port=port)
        assistant = build_asgi_application(assistant_server(), "127.0.0.1", "")
        dash, mcp = in_thread(dashboard, port), in_thread(assistant, 0)
        found["dashboard"] = Serving(next(dash), of_table(dashboard.app.routes))
        found["mcp"] = Serving(next(mcp), of_table(assistant.app.routes))
        yield found
        for one in (dash, mcp):
            next(one, None)
    node.close()


def asked(user: int, requests: list[tuple[int, str, str, dict[str, str]]]) -> list[tuple[int, str]]:
    """The answers to *requests* of *user*."""
    if user != os.getuid() and os.getuid() != 0:
        pytest.skip("only root can act as another user")
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(user)], input=json.dumps(requests), text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


def wrong_keys(serving: Serving, servers: dict[str, Serving]) -> list[dict[str, str]]:
    """Headers that must not open a server, among them what opens another one."""
    dash = servers["dashboard"].port
    cookie = derive_server_key(user_token(), COOKIE, server_name(dash))
    key = address_key(user_token(), dash)
    other = derive_server_key(user_token(), COOKIE, server_name(dash + 1))
    return [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {user_token()}"},
        {"Authorization": f"Bearer {cookie}"},
        {"Authorization": f"Bearer {key}"},
        {"Cookie": f"zeromon-{serving.port}={user_token()}"},
        {"Cookie": f"zeromon-{dash}={other}; zeromon-{serving.port}={key}"},
        request_proof_headers("wrong", READ, b"/api/runs?"),
    ]


@pytest.mark.parametrize("name", ["collector", "dashboard", "mcp"])
@pytest.mark.parametrize("user", [os.getuid(), NOBODY], ids=["this user", "another user"])
def test_b2_no_route_answers_without_a_token(servers: dict[str, Serving], name: str, user: int) -> None:
    """The routes are those of the server's own table: one that is new is asked, too."""
    serving = servers[name]
    assert len(serving.routes) >= {"collector": 14, "dashboard": 12, "mcp": 1}[name]
    requests, expected = [], []
    for method, path in [*serving.routes, ("GET", "/nothing"), ("POST", "/nothing")]:
        signed = (name, path) == ("collector", "/api/exchange")  # has a proof of its own
        for headers in wrong_keys(serving, servers):
            requests.append((serving.port, method, filled(path), headers))
            expected.append((200, 200) if (name, path) in OPEN else (401, 405))
        requests.append(
            (serving.port, method, filled(path), {"Authorization": f"Bearer {user_token()}"})
        )
        expected.append((401, 401) if signed else (0, 0))
    for request, (status, content), known in zip(requests, asked(user, requests), expected, strict=True):
        if known == (0, 0):
            assert status not in (401, 403), (request, status)
            continue
        assert status in known and RUN not in content, (request, status)


def test_b2_another_user_reads_no_address_with_a_key(servers: dict[str, Serving]) -> None:
    """An address with a wrong key, with the token, with the key of the dashboard at another port."""
    dash = servers["dashboard"].port
    keys = ("wrong", user_token(), address_key(user_token(), dash + 1), "")
    requests = [(dash, "GET", f"/live?token={key}", {}) for key in keys]
    assert [status for status, _ in asked(NOBODY, requests)] == [401] * len(keys)
    requests = [(dash, "GET", f"/live?token={address_key(user_token(), dash)}", {})]
    assert asked(os.getuid(), requests)[0][0] == 303


# ---- requests that are broken, slow or many ---------------------------------------------------------

OUTSIDE = "content-outside-of-the-store"
LEADS = ("../secret", "..%2fsecret", "%2e%2e/secret", "..%5csecret", "/etc/passwd", "%2fetc%2fpasswd",
         "....//secret", "..;/secret", "%00", "../../../../../../../../etc/passwd")  # fmt: skip


@pytest.mark.parametrize("name", ["collector", "dashboard", "mcp"])
def test_no_path_leads_out_of_the_store(servers: dict[str, Serving], name: str) -> None:
    """Every place of every route that takes a name, by who has the token."""
    serving = servers[name]
    for folder in (store := Path(os.environ["ZEROMON_STORE"])), store / "runs":
        (folder / "secret").write_text(OUTSIDE)
    mine = {"Authorization": f"Bearer {user_token()}"}
    routes = [(method, path) for method, path in serving.routes if method == "GET"]
    requests = [
        (serving.port, method, re.sub(r"\{[^}]*\}", lead, path), mine)
        for lead in LEADS
        for method, path in [*routes, ("GET", "/{name}"), ("GET", "/assets/{name}")]
        if "{" in path
    ]
    for request, (status, content) in zip(requests, asked(os.getuid(), requests), strict=True):
        assert status < 500 and OUTSIDE not in content and "root:x:" not in content, request


def broken(mine: bytes) -> dict[str, bytes]:
    """Bytes that are no request, or more than one may be."""
    begin = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n" + mine
    post = begin.replace(b"GET /metrics", b"POST /api/trace")
    return {
        "a header of 200 kB": begin + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        "5,000 headers": begin + b"X: y\r\n" * 5_000 + b"\r\n",
        "a query of 200 kB": begin.replace(b"metrics", b"metrics?" + b"a" * 200_000) + b"\r\n",
        "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        "NUL bytes": bytes(1000),
        "HTTP/0.9": b"GET /metrics\r\n\r\n",
        "CR LF in the path": begin.replace(b"/metrics", b"/x\r\nSet-Cookie: a=b\r\n") + b"\r\n",
        "two lengths": post + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}",
        "a negative length": post + b"Content-Length: -1\r\n\r\n{}",
        "chunks of 3 MB": post
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + (b"10000\r\n" + b"x" * 65_536 + b"\r\n") * 46
        + b"0\r\n\r\n",
    }


def raw(port: int, content: bytes) -> bytes:
    """The whole answer to *content*; a server may close before it has read it."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sending:
        with suppress(OSError):  # ENOTCONN, too, where the server was faster
            sending.sendall(content)
            sending.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while piece := sending.recv(1 << 16):
                answer += piece
    return answer


@pytest.mark.parametrize("name", ["collector", "dashboard", "mcp"])
def test_broken_requests_are_refused_and_others_answered(servers: dict[str, Serving], name: str) -> None:
    port = servers[name].port
    mine = f"Authorization: Bearer {user_token()}\r\n".encode()
    for what, content in (broken(b"") | broken(mine)).items():
        answer = raw(port, content)
        head = answer.partition(b"\r\n\r\n")[0]
        assert b"Set-Cookie" not in head and not re.match(rb"HTTP/1\.\d 5", head), (what, head)
        if mine not in content:
            assert RUN.encode() not in answer, what
    assert asked(os.getuid(), [(port, "GET", "/", {})])[0][0] in (401, 404)


@pytest.mark.parametrize("token", [True, False], ids=["with the token", "without"])
@pytest.mark.parametrize("name", ["collector", "dashboard", "mcp"])
def test_slow_headers_and_bodies_keep_nobody_out(
    servers: dict[str, Serving], name: str, token: bool
) -> None:
    """100 that begin a request, and 100 that begin a body: none of them ends."""
    port = servers[name].port
    path = {"collector": "/api/trace", "dashboard": "/_dash-update-component", "mcp": "/mcp"}[name]
    begin = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    begin += f"Authorization: Bearer {user_token()}\r\n" if token else ""
    slow = []
    for rest in ("X: ", 'Content-Type: application/json\r\nContent-Length: 900\r\n\r\n{"run": "'):
        for _ in range(100):
            slow.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            slow[-1].sendall((begin + rest).encode())
    mine = {"Authorization": f"Bearer {user_token()}"}
    readable = {"collector": "/api/runs", "dashboard": "/live?to=/", "mcp": "/nothing"}[name]
    for status, _ in asked(os.getuid(), [(port, "GET", readable, mine)] * 5):
        assert status == (404 if name == "mcp" else 200)
    for one in slow:
        one.close()


def test_300_scrapes_at_once_are_all_answered(servers: dict[str, Serving]) -> None:
    mine = {"Authorization": f"Bearer {user_token()}"}
    port = servers["collector"].port
    with ThreadPoolExecutor(30) as pool:
        answers = pool.map(lambda _: get(port, "/metrics", **mine), range(300))
    assert {(status, RUN.encode() in content) for status, content in answers} == {(200, True)}


READER = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    try:
        print(open(path, "rb").read())
    except OSError as error:
        print(type(error).__name__)
"""


def test_b2_the_files_with_a_token_are_private(tmp_path: Path) -> None:
    """Also where the umask lets everybody read, and where another program has left a file there."""
    kept = os.umask(0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
            first = user_token()
            path = user_token_file()
            assert path is not None and user_token() == first
            assert [p.stat().st_mode & 0o777 for p in (path, path.parent)] == [0o600, 0o700]
            path.chmod(0o644)  # others may have read it
            second = user_token()
            assert second != first and path.stat().st_mode & 0o777 == 0o600
            path.unlink()
            (tmp_path / "theirs").write_text("known-to-them")
            path.symlink_to(tmp_path / "theirs")
            assert user_token() not in (first, second, "known-to-them") and not path.is_symlink()
            path.unlink()
            os.mkfifo(path)
            assert len(user_token()) > 20
    finally:
        os.umask(kept)


def test_two_processes_make_one_token(tmp_path: Path) -> None:
    code = "from zeromon.ring.tokens import user_token; print(user_token())"
    environment = clean_environment() | {
        "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    made = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    assert len({one.communicate()[0] for one in made}) == 1


def test_without_a_writable_folder_a_server_has_a_token_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zeromon.ring.tokens._token_folders", lambda: iter([Path("/proc/none")]))
    assert user_token_file() is None and user_token() == user_token() and len(user_token()) > 20


PASSWORD = "hunter2-of-the-user"
NOTIFY = "key-of-the-chat"
TOLD = f"""
import os
print('TOLD', sorted(os.environ.items()))
raise RuntimeError("cannot reach https://me:{PASSWORD}@host/ with password='{PASSWORD}'")
"""


def test_w4_w5_no_secret_is_in_a_record_and_no_token_in_an_environment(node: Node) -> None:
    """The collector and the ranks have the token by a file that only this user can read.

    The password that the program got, and that its exception repeats, is masked in all that is kept.
    """
    program = node.folder / "told.py"
    program.write_text((ROOT / "tests" / "programs" / "tiny.py").read_text() + TOLD)
    environment = clean_environment() | {
        "ZEROMON_DIR": str(node.root), "ZEROMON_STORE": str(node.folder / "store"),
        "ZEROMON_TOKEN": TOKEN, "STEPS": "60", "PAUSE": "0.1",
        "ZEROMON_NOTIFY": f"json://me:{NOTIFY}@127.0.0.1:9/{NOTIFY}",
    }  # fmt: skip
    training = subprocess.Popen(
        [sys.executable, "-m", "zeromon", "run", "--name", "r", "--", *FORKED, "2",
         str(program), "--password", PASSWORD],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    facts = wait_for(lambda: _facts(node.root))
    wait_for(lambda: list((node.root / "r").glob("rank*.ring")))
    pids = [training.pid, *(int(p) for p in _children(training.pid))]
    assert len(pids) >= 3
    for pid in pids:
        for name in ("environ", "cmdline"):
            content = Path(f"/proc/{pid}/{name}").read_bytes()
            assert TOKEN.encode() not in content, (pid, name)
            assert NOTIFY.encode() not in content or pid == training.pid, (pid, name)
    assert TOKEN.encode() not in Path(f"/proc/{facts['pid']}/cmdline").read_bytes()
    assert facts["key"] == TOKEN, "the collector has it all the same"
    with pytest.MonkeyPatch.context() as patch:  # the same user, in a shell that knows no token
        patch.setenv("ZEROMON_DIR", str(node.root))
        patch.delenv("ZEROMON_TOKEN", raising=False)
        (known,) = runs_at_address(f"127.0.0.1:{facts['port']}")
        assert known.run == "r" and known.command[-2:] == ("--password", MASK)
    secret = [node.root / "r" / "token", node.root / "collector.json", f"/proc/{facts['pid']}/environ"]
    if os.getuid() == 0:
        read = subprocess.run(
            [sys.executable, "-c", READER, *map(str, secret)], capture_output=True, text=True
        )
        assert read.stdout.split() == ["PermissionError"] * 3, read
    said, _ = training.communicate(timeout=120)
    assert "TOLD" in said and TOKEN not in said and NOTIFY not in said
    recorded = wait_for(lambda: node.store.names() and node.store.load("r").ended and node.store.load())
    assert f"https://me:{MASK}@host/ with password='{MASK}'" in str(recorded.ranks)
    for path in (path for path in node.store.folder("r").rglob("*") if path.is_file()):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert not [one for one in (TOKEN, PASSWORD, NOTIFY) if one.encode() in content], path


def _facts(root: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads((root / "collector.json").read_text())
    except (OSError, ValueError):
        return None
    return facts


def _children(pid: int) -> Iterator[str]:
    """All processes below *pid*."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield child
        yield from _children(int(child))


# ---- the cookie -----------------------------------------------------------------------------------


@pytest.fixture
def thief() -> Iterator[tuple[int, list[str]]]:
    """A server at another port of this host, and the cookies that it was sent."""
    stolen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stolen.append(self.headers.get("Cookie", ""))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<p>hello</p>")

        def log_message(self, *_: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made.server_port, stolen
    made.shutdown()


def test_w1_the_cookie_that_another_port_gets_opens_nothing_of_the_job(
    servers: dict[str, Serving], thief: tuple[int, list[str]]
) -> None:
    """In a real browser, which sends a cookie to every port of its host."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    dash, (port, stolen) = servers["dashboard"].port, thief
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{dash}/?token={address_key(user_token(), dash)}")
        page.wait_for_selector("#run-table", timeout=60_000)
        assert "token" not in page.url
        page.goto(f"http://127.0.0.1:{port}/")
        browser.close()
    cookie = next(one for one in stolen if one)
    value = re.fullmatch(rf"zeromon-{dash}=([0-9a-f]+)", cookie)[1]  # type: ignore[index]
    assert value not in (user_token(), address_key(user_token(), dash))
    requests = []
    for name, serving in servers.items():
        for path in {"collector": "/api/runs", "dashboard": "/live", "mcp": "/mcp"}[name], "/":
            bearer = {"Authorization": f"Bearer {value}"}
            named = {"Cookie": f"zeromon-{serving.port}={value}"}
            requests += [(serving.port, "GET", path, bearer)]
            requests += [(serving.port, "GET", path, named)] if name != "dashboard" else []
            requests += [(serving.port, "GET", f"{path}?token={value}", {})]
    for request, (status, _) in zip(requests, asked(NOBODY, requests), strict=True):
        assert status == 401, request
