"""Three hosts of two ranks, each with a clock of its own: one run, and what befalls it one by one.

The tests go on from each other, for starting six ranks takes longer than all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from nodes.hosts import BRIDGE, OUTSIDE, TOKEN, Hosts, possible, train, within
from receivers import Webhook, webhook
from support import PROGRAMS

from zeromon.sources.live import LiveSource, NewSteps

MISSING = possible()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "nothing is missing"),
    # Three nodes on two cores, whose collectors have a low priority: beside other tests, they starve
    pytest.mark.alone,
]

Snapshot = dict[str, Any]


class Trained:
    """The run, as its three collectors show it."""

    def __init__(self, hosts: Hosts, people: Webhook) -> None:
        self.hosts = hosts
        self.people = people
        """Who receives the alerts of all nodes; the path is the node that sent them."""
        self.run = ""

    def snapshot(self, number: int) -> Snapshot:
        snapshot: Snapshot = self.hosts.get(number, f"/api/runs/{self.run}")
        return snapshot

    def until(self, number: int, holds: Callable[[Snapshot], bool], seconds: float = 60) -> Snapshot:
        """The first snapshot of a node that *holds*."""
        deadline = time.monotonic() + seconds
        while True:
            snapshot = self.snapshot(number)
            if holds(snapshot):
                return snapshot
            told = [(f["rule"], f["text"]) for f in snapshot["findings"]]
            assert time.monotonic() < deadline, (told, snapshot["nodes"], snapshot["stragglers"])
            time.sleep(0.5)

    def slow(self, *ranks: int) -> None:
        """These ranks, and no others, sleep 120 ms per step longer."""
        for old in self.hosts.folder.glob("slow*"):
            old.unlink()
        for rank in ranks:
            (self.hosts.folder / f"slow{rank}").write_text("0.12")


def findings(snapshot: Snapshot, rule: str) -> list[Snapshot]:
    return [found for found in snapshot["findings"] if found["rule"] == rule]


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    folder = Path(tempfile.mkdtemp(prefix="zeromon-nodes-"))
    hosts = Hosts(folder, 3)
    here = ExitStack()
    try:
        here.enter_context(within(BRIDGE))
        people = here.enter_context(webhook(OUTSIDE))
        url = f"http://{OUTSIDE}:{people.port}"
        train(hosts, 2, PROGRAMS / "on_nodes.py", str(folder), forked=True, notify=url)
        found = Trained(hosts, people)
        deadline = time.monotonic() + 120
        while not found.run:
            time.sleep(0.5)
            assert time.monotonic() < deadline, [host.log() for host in hosts.hosts]
            runs = _runs(hosts)
            if len(runs) == 3 and len({r["run"] for r in runs}) == 1 and runs[0]["step"] > 5:
                found.run = runs[0]["run"]
        yield found
    finally:
        here.close()
        hosts.close()
        shutil.rmtree(folder, ignore_errors=True)


def _runs(hosts: Hosts) -> list[Snapshot]:
    found: list[Snapshot] = []
    for number in range(3):
        try:
            found += hosts.get(number, "/api/runs")
        except OSError:
            return []
    return found


def test_every_node_lists_all_under_one_name(trained: Trained) -> None:
    """Each was started by a `zeromon run` of its own, and none was told of the others."""
    lists = []
    for number in range(3):
        trained.until(number, lambda p: all(n["heard_seconds"] is not None for n in p["nodes"][1:]))
        lists.append(trained.hosts.get(number, "/sd"))
    assert lists[0] == lists[1] == lists[2]
    kept = trained.hosts.hosts[0].folder / "sd.json"
    assert json.loads(kept.read_text()) == lists[0]
    assert [group["targets"] for group in lists[0]] == [[f"10.77.0.{n}:9417"] for n in (1, 2, 3)]
    labels = [group["labels"] for group in lists[0]]
    assert {label["__meta_zeromon_run"] for label in labels} == {trained.run}
    assert [label["__meta_zeromon_node"] for label in labels] == ["zm0", "zm1", "zm2"]
    assert [label["__meta_zeromon_ranks"] for label in labels] == ["0-1", "2-3", "4-5"]


def test_clocks_are_compared_within_the_error_that_is_stated(trained: Trained) -> None:
    """Their monotonic clocks were set apart by 1,000 and 2,000 s, and run on the same crystal."""
    for number in (1, 2):
        # the first message may take long on a busy machine; the error is that of the fastest
        snapshot = trained.until(
            number, lambda p, n=number: (p["nodes"][n]["clock_error_seconds"] or 1.0) < 0.01
        )
        node = snapshot["nodes"][number]
        off = abs(node["clock_offset_seconds"] - 1000 * number)
        assert off <= node["clock_error_seconds"]


def test_the_steps_of_all_nodes_are_read_by_asking_the_first(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `zeromon attach --track` does; from each later step on, each once."""
    monkeypatch.setenv("ZEROMON_TOKEN", TOKEN)
    steps = NewSteps(LiveSource(f"{trained.hosts.hosts[0].address}:9417", trained.run))
    assert [rank.rank for rank in steps.run().ranks] == list(range(6))
    first = steps.rows()
    steps.kept()
    trained.until(0, lambda p: p["ranks"][0]["steps"]["last_step"] > first[-1]["step"] + 10)
    steps.run()
    rows = [(row["rank"], row["step"]) for row in (*first, *steps.rows())]
    assert len(rows) == len(set(rows))
    for rank in range(6):
        mine = sorted(step for number, step in rows if number == rank)
        assert mine == list(range(1, len(mine) + 1))


def test_a_late_rank_is_named_on_every_node(trained: Trained) -> None:
    """Rank 3 is the second of the second node; what it does is known there."""
    trained.slow(3)
    for number in range(3):
        snapshot = trained.until(number, lambda p: bool(p["stragglers"]))
        (late,) = snapshot["stragglers"]
        assert (late["rank"], late["whole_node"]) == (3, False)
        assert late["node"] == ("" if number == 1 else "zm1")
        assert late["phases"] == (["other"] if number == 1 else [])
        assert 0.06 < late["late_seconds"] < 0.25
        (told,) = findings(snapshot, "straggler")
        assert told["rank"] == 3
        assert ("on node zm1" in told["text"]) == (number != 1)


@pytest.mark.long
def test_a_node_whose_ranks_are_all_late_is_named(trained: Trained) -> None:
    trained.slow(4, 5)
    for number in range(3):
        snapshot = trained.until(number, lambda p: any(s["whole_node"] for s in p["stragglers"]))
        (late,) = snapshot["stragglers"]
        assert (late["node"], late["rank"] in (4, 5)) == ("zm2", True)
        assert any(
            f["text"].startswith("node zm2: all its ranks") for f in findings(snapshot, "straggler")
        )
    trained.slow()


@pytest.mark.long
def test_a_long_way_to_a_node_is_named(trained: Trained) -> None:
    """20 ms each way: all come to their collectives together, and wait for that node's part."""
    before = trained.snapshot(0)["nodes"][2]["round_trip_seconds"]
    assert before < 0.02
    trained.hosts.cable.delay = 0.02
    # A busy machine alone may make a trip of 11 ms, and the finding comes before the cable is slow.
    snapshot = trained.until(
        0, lambda p: p["nodes"][2]["round_trip_seconds"] >= 0.04 and bool(findings(p, "distant_node"))
    )
    assert [f["rank"] for f in findings(snapshot, "distant_node")] == [4]
    assert "a round trip to node zm2 takes" in findings(snapshot, "distant_node")[0]["text"]
    trained.hosts.cable.delay = 0.0
    trained.until(0, lambda p: p["nodes"][2]["round_trip_seconds"] < 0.02)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus")
def test_prometheus_finds_all_nodes_by_asking_one(trained: Trained, prometheus: str) -> None:
    def ask(query: str) -> dict[str, float]:
        found = json.loads(
            _read(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
        )
        return {
            row["metric"].get("node", "") + row["metric"].get("rank", ""): float(row["value"][1])
            for row in found["data"]["result"]
        }

    deadline = time.monotonic() + 120
    while len(ask("zeromon_steps_total")) < 6:
        assert time.monotonic() < deadline, _read(f"{prometheus}/api/v1/targets")
        time.sleep(0.5)
    assert ask("up") == {"zm0": 1, "zm1": 1, "zm2": 1}
    steps = ask(f'zeromon_steps_total{{run="{trained.run}"}}')
    assert sorted(steps) == ["zm00", "zm01", "zm12", "zm13", "zm24", "zm25"]
    assert max(steps.values()) - min(steps.values()) <= 60


@pytest.fixture
def prometheus(trained: Trained, tmp_path: Path) -> Iterator[str]:
    """One that was told of the second node's collector only."""
    (tmp_path / "token").write_text(TOKEN)
    access = {"authorization": {"credentials_file": str(tmp_path / "token")}}
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "zeromon",
                "honor_labels": True,
                **access,
                "http_sd_configs": [
                    {"url": f"http://{trained.hosts.hosts[1].address}:9417/sd", **access}
                ],
                "relabel_configs": [{"source_labels": ["__meta_zeromon_node"], "target_label": "node"}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    running = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml",
         f"--storage.tsdb.path={tmp_path}/data", "--web.listen-address=127.0.0.1:29490"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not _answers("http://127.0.0.1:29490/-/ready"):
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.2)
        yield "http://127.0.0.1:29490"
    finally:
        running.terminate()
        running.wait(20)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def _answers(url: str) -> bool:
    try:
        _read(url)
    except OSError:
        return False
    return True


@pytest.mark.long
def test_a_cut_link_is_a_silent_node_and_a_hang_that_names_its_ranks(trained: Trained) -> None:
    trained.hosts.cable.delay = None
    for number in (0, 1):
        snapshot = trained.until(
            number,
            lambda p: bool(findings(p, "node_silent")) and bool(findings(p, "collective_in_flight")),
        )
        (silent,) = findings(snapshot, "node_silent")
        assert silent["text"].startswith("node zm2 has not reported for ")
        assert "(ranks 4 to 5): it is down" in silent["text"]
        hang = snapshot["hangs"][0]
        assert set(hang["elsewhere"]) == {4, 5} and set(hang["waiting"]) <= {0, 1, 2, 3}
        assert hang["missing"] == hang["dead"] == []
        told = findings(snapshot, "collective_in_flight")[0]["text"]
        assert "ranks 4, 5 on zm2 are not heard" in told


def test_a_node_that_comes_back_is_heard_and_one_that_is_killed_is_named(trained: Trained) -> None:
    """The power goes: nothing on it says goodbye, and no packet tells the others."""
    trained.hosts.cable.delay = 0.0
    trained.until(0, lambda p: not findings(p, "node_silent") and p["nodes"][2]["heard_seconds"] < 5)
    trained.hosts.hosts[2].kill()
    for number in (0, 1):
        snapshot = trained.until(number, lambda p: bool(findings(p, "node_silent")))
        text = findings(snapshot, "node_silent")[0]["text"]
        assert text.startswith("node zm2 has not reported for ") and "(ranks 4 to 5)" in text
        assert [node["silent"] for node in snapshot["nodes"]] == [False, False, True]


def test_a_rank_that_dies_is_named_on_the_other_nodes(trained: Trained) -> None:
    pids = {rank["rank"]: rank["pid"] for rank in trained.snapshot(1)["ranks"]}
    os.kill(pids[2], signal.SIGKILL)
    snapshot = trained.until(0, lambda p: any(a["rank"] == 2 and a["failed"] for a in p["away"]))
    died = next(f for f in findings(snapshot, "rank_died") if f["rank"] == 2)
    assert "on node zm1" in died["text"]
    assert "SIGKILL" in died["text"]
    assert {a["rank"] for a in snapshot["away"] if a["failed"]} <= {2, 3}


def test_the_first_node_alone_tells_people_of_a_death_on_another(trained: Trained) -> None:
    def died() -> list[str]:
        told = [request.json for request in trained.people.requests]
        # a busy machine may tell it when the ranks of the first node are dead, too
        titles = [f"{word}: {trained.run}" for word in ("dying", "dead")]
        return [one["message"] for one in told if one["title"] in titles]

    deadline = time.monotonic() + 120
    while not died():
        assert time.monotonic() < deadline, [r.json for r in trained.people.requests]
        time.sleep(0.2)
    (text,) = died()
    assert "rank 2: " in text and "on node zm1" in text
    assert {request.path for request in trained.people.requests} == {"/zm0"}
