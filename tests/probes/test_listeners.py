"""Who listens on a port, and that nobody else gets a token."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeromon.base.errors import SourceError
from zeromon.probes.network import listening_user_ids
from zeromon.sources.live import collector_address, runs_at_address

EVE = """
import encodings.idna, http.server, os
os.setuid(65534)
class Evil(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print(self.path, self.headers["Authorization"], flush=True)
        self.send_response(200); self.end_headers(); self.wfile.write(b"[]")
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Evil)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listening_user_ids(port) == {os.getuid()}
    assert listening_user_ids(port) == set()


def test_a_kernel_that_does_not_tell_is_unknown(tmp_path: Path) -> None:
    assert listening_user_ids(80, (str(tmp_path / "none"),)) is None


def test_the_file_of_a_killed_collector_leads_nowhere(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = {"host": "127.0.0.1", "port": port}
        (tmp_path / "collector.json").write_text(json.dumps(facts))
        assert collector_address(tmp_path) == f"127.0.0.1:{port}"
    assert collector_address(tmp_path) is None


def test_a_link_or_a_file_of_another_user_is_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        facts = json.dumps({"host": "127.0.0.1", "port": server.getsockname()[1]})
        (tmp_path / "theirs.json").write_text(facts)
        (tmp_path / "collector.json").symlink_to(tmp_path / "theirs.json")
        assert collector_address(tmp_path) is None
        (tmp_path / "collector.json").unlink()
        (tmp_path / "collector.json").write_text(facts)
        monkeypatch.setattr("zeromon.ring.paths.owner_uid_of", lambda path: 1 + (path == tmp_path))
        assert collector_address(tmp_path) is None


@pytest.fixture
def eve() -> Iterator[subprocess.Popen[str]]:
    """A server of another user, who has taken the port of a collector that was killed."""
    if os.getuid():
        pytest.skip("only root can act as another user")
    server = subprocess.Popen([sys.executable, "-c", EVE], stdout=subprocess.PIPE, text=True)
    yield server
    server.kill()
    server.wait()


def test_another_users_server_gets_no_token(
    eve: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert eve.stdout is not None
    port = int(eve.stdout.readline())
    assert listening_user_ids(port) == {65534}
    monkeypatch.setenv("ZEROMON_TOKEN", "s3cr3t")
    assert runs_at_address(f"127.0.0.1:{port}") == []
    assert eve.stdout.readline().strip() == "/api/runs None"
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path))
    (tmp_path / "collector.json").write_text(json.dumps({"host": "127.0.0.1", "port": port}))
    with pytest.raises(SourceError):
        runs_at_address("127.0.0.1:1")
