"""What people are told of real runs: of a death once, of a healthy run nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from receivers import Webhook, webhook
from served import get
from support import LAUNCH, PROGRAMS, ROOT, Node, clean_environment, free_port, wait_for

from zeromon.collector.notify import parse_target
from zeromon.ring import paths
from zeromon.sources.live import collector_address

pytestmark = pytest.mark.long
TWO = [*LAUNCH, "2", str(PROGRAMS / "tiny.py")]
SECRET = "s3cr3ts3cr3ts3cr3t"


@pytest.fixture
def server() -> Iterator[Webhook]:
    with webhook() as one:
        yield one


def watched(node: Node, url: str, **extra: str) -> str:
    """Runs tiny.py by `zeromon run --notify`, to its end; what an observer finds of its collector."""
    environment = clean_environment() | {
        "ZEROMON_DIR": str(node.root), "ZEROMON_STORE": str(node.folder / "store"), **extra
    }  # fmt: skip
    words = ["run", "--name", "r", "--port", str(free_port()), "--notify", url, "--", *TWO]
    command = [sys.executable, "-m", "zeromon", *words]
    training = subprocess.Popen(
        command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )  # fmt: skip
    address = wait_for(lambda: collector_address(node.root))
    pid = json.loads((node.root / "collector.json").read_text())["pid"]
    seen = Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()
    _, narration = training.communicate(timeout=120)
    wait_for(lambda: node.store.names() and node.store.load("r").ended)
    for path in ("/metrics", "/api/runs", "/api/runs/r"):
        seen += get(int(address.rpartition(":")[2]), path)[1].decode()
    return seen + narration


def test_a_rank_that_is_killed_is_told_of_once(node: Node, server: Webhook) -> None:
    """And the URL is nowhere but in the run's own folder, while it runs."""
    url = f"http://user:{SECRET}@127.0.0.1:{server.port}/{SECRET}"
    seen = watched(node, url, FAULT="kill", WHO="1", STEPS="20")
    wait_for(lambda: server.requests)
    time.sleep(2.0)
    (request,) = server.requests
    assert request.path == f"/{SECRET}"
    assert request.json["title"] in ("dying: r", "dead: r")
    assert "rank 1" in request.json["message"]
    assert SECRET not in seen
    kept = [path for path in node.folder.rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if SECRET.encode() in path.read_bytes()]


def test_a_healthy_run_tells_nothing(node: Node, server: Webhook) -> None:
    watched(node, f"json://127.0.0.1:{server.port}", STEPS="40", PAUSE="0.05")
    time.sleep(1.0)
    assert server.requests == []


def test_a_slow_server_delays_no_tick(node: Node, server: Webhook) -> None:
    """It takes the message, and answers seconds later."""
    server.pause = 8.0
    ticks: list[float] = []
    tick = node.collector.tick

    def timed() -> None:
        began = time.monotonic()
        tick()
        if server.requests:
            ticks.append(time.monotonic() - began)

    node.collector.tick = timed  # type: ignore[method-assign]
    folder = node.root / "r"
    folder.mkdir()
    urls: list[Any] = [parse_target(f"json://127.0.0.1:{server.port}")]
    (folder / paths.NOTIFY).write_text(json.dumps(urls))
    result = node.run(TWO, run="r", FAULT="kill", WHO="1", STEPS="200", PAUSE="0.05")
    assert result.snapshot.ended
    wait_for(lambda: server.requests)
    assert not node.collector.may_end()
    for _ in range(10):
        node.collector.tick()
    assert len(ticks) >= 10 and max(ticks) < 1.0
