"""Three hosts: one loses frames, one has a wrong clock, one sends rubbish with the right token.

What holds whatever they send: the training goes on, the collectors answer, the figures of the ranks that
are well stay as they are, and nobody is accused of an hour.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes.hosts import BRIDGE, TOKEN, Hosts, possible, train, within
from support import PROGRAMS, wait_for

from zeromon.collector.cluster import EXCHANGE
from zeromon.ring.tokens import REPORT, request_proof_headers

MISSING = possible()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing"),
    pytest.mark.long,
]
CLOCK = "node zm1 reports arrivals of the future: its clock is wrong"
HOUR_NS = 3600 * 10**9


class Nodes:
    """One run on three hosts of one rank each."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.run = ""

    def snapshot(self, number: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = self.hosts.get(number, f"/api/runs/{self.run}")
        return found

    def step(self) -> int:
        return int(self.snapshot()["ranks"][0]["steps"]["last_step"])

    def report(self, body: bytes) -> int:
        """Sends the leader a report with the token of the job; returns the status."""
        connection = http.client.HTTPConnection(self.hosts.hosts[0].address, 9417, timeout=10)
        headers = dict(request_proof_headers(TOKEN, REPORT, body))
        connection.request("POST", "/api/exchange", body, headers)
        status = connection.getresponse().status
        connection.close()
        return status


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    folder = Path(tempfile.mkdtemp(prefix="zeromon-liars-"))
    hosts = Hosts(folder, 3)
    try:
        with within(BRIDGE):
            train(hosts, 1, PROGRAMS / "on_nodes.py", str(folder))
            found = Nodes(hosts)
            found.run = wait_for(lambda: _name(hosts), 120)
            wait_for(lambda: len(found.snapshot()["nodes"]) == 3 and found.step() > 20, 120)
            yield found
    finally:
        hosts.close()
        shutil.rmtree(folder, ignore_errors=True)


def _name(hosts: Hosts) -> str:
    """The run's name once the leader lists it."""
    try:
        runs = hosts.get(0, "/api/runs")
    except OSError:
        return ""
    return str(runs[0]["run"]) if runs and runs[0]["step"] > 5 else ""


def said(nodes: Nodes, first: int, shift_ns: int) -> dict[str, Any]:
    """A report of node zm*first*, whose clock is wrong by *shift_ns*, of calls that all members make."""
    card = {"node": f"zm{first}", "address": "10.77.0.9:1", "first_rank": first, "ranks": 1}
    now = time.monotonic_ns() + shift_ns
    groups = nodes.snapshot()["ranks"][0]["communication"]["groups"]
    joints = [
        [place, ["", group["sequence"] + ahead, 3, 1, now, now, first, -(1 << 62), 1000]]
        for place, group in enumerate(groups)
        for ahead in range(64)
    ]
    return {
        "run": nodes.run, "card": card, "exchange": EXCHANGE, "zeromon": "0", "round_trip_ns": -1,
        "known": 3, "groups": [group["group_id"] for group in groups], "joints": joints, "peers": [],
    }  # fmt: skip


def test_a_node_with_a_wrong_clock_accuses_nobody_of_an_hour(nodes: Nodes) -> None:
    """The collector of zm1 stands still, and reports in its place are an hour ahead, then behind."""
    before = nodes.step()
    facts = json.loads((nodes.hosts.hosts[1].folder / "rings" / "collector.json").read_text())
    os.kill(facts["pid"], signal.SIGSTOP)
    try:
        for ahead in (1, -1):
            for turn in range(200):
                assert nodes.report(json.dumps(said(nodes, 1, ahead * HOUR_NS)).encode()) == 200
                time.sleep(0.05)
                if turn % 20 == 19:
                    snapshot = nodes.snapshot()
                    assert snapshot["stragglers"] == []
                    assert turn < 60 or (CLOCK in snapshot["nodes_note"]) == (ahead > 0)
    finally:
        os.kill(facts["pid"], signal.SIGCONT)
    assert nodes.step() > before


def test_rubbish_with_the_right_token_is_refused_and_the_others_are_read(nodes: Nodes) -> None:
    """Truncated, changed by a byte, nested, large and foreign reports: each gets 200 or a 4xx."""
    before, rng = nodes.step(), random.Random(20261126)
    good = json.dumps(said(nodes, 1, 0)).encode()
    statuses = set()
    for turn in range(2000):
        body = bytearray(good[: rng.randrange(1, len(good))] if turn % 3 == 0 else good)
        for _ in range(rng.randrange(1, 8)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        statuses.add(nodes.report(bytes(body)))
    for body in (b"", b"[" * 100_000, b"\0" * 1_000_000, good.replace(b"zm1", b"\\u001b[2J\\u0000")):
        statuses.add(nodes.report(bytes(body)))
    assert statuses <= {200, 400, 404, 413}, statuses
    snapshot = nodes.snapshot()
    assert nodes.step() > before
    assert [rank["status"]["alive"] for rank in snapshot["ranks"]] == [True]
    wait_for(lambda: nodes.snapshot()["nodes"][1]["node"] == "zm1", 30)
    assert "\x1b" not in json.dumps(snapshot, ensure_ascii=False)


def test_a_link_that_loses_frames_is_no_lost_node(nodes: Nodes) -> None:
    """One frame in fifty, each way, for twenty seconds: TCP sends it again, and nobody is silent."""
    before = nodes.step()
    nodes.hosts.cable.lost_share = 0.02
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            assert [node["silent"] for node in nodes.snapshot()["nodes"][:3]] == [False] * 3
            time.sleep(0.5)
    finally:
        nodes.hosts.cable.lost_share = 0.0
    assert nodes.step() > before
    for number in range(3):
        ranks = nodes.snapshot(number)["ranks"]
        agent, status = ranks[0]["agent"], ranks[0]["status"]
        assert (len(ranks), status["alive"], agent["dropped"], agent["errors"]) == (1, True, 0, 0)
