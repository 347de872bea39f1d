"""How nodes find each other: on a real store. tests/nodes does it with a whole run."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from support import wait_for

from zeromon.collector.cluster_client import RunCluster
from zeromon.ring.tokens import sign_node_card
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.rendezvous import (
    JobStore,
    Rendezvous,
    collector_at,
    connection_of,
    is_first_on_node,
    node_of,
)


def stores(kind: str, job: dist.TCPStore) -> tuple[JobStore, ...]:
    """The same store, as two nodes open it."""
    store = dist.PrefixStore("default_pg", job)
    if kind == "clone":
        return JobStore(connection_of(store)), JobStore(connection_of(store))
    below = store.underlying_store

    class Old:
        """A store of torch 2.6, which cannot be cloned."""

        underlying_store = below

    return JobStore(connection_of(Old())), JobStore(connection_of(Old()))


@pytest.mark.parametrize("kind", ["clone", "connect"])
def test_a_node_reads_what_another_publishes(kind: str) -> None:
    job = dist.TCPStore("127.0.0.1", 0, is_master=True)
    here, there = stores(kind, job)
    assert there.nodes() == []
    here.publish(b'{"a": 1}')
    there.publish(b"second")
    for store in (here, there):
        assert sorted(store.nodes()) == [b"second", b'{"a": 1}']


def test_a_store_that_cannot_be_shared_is_left_alone() -> None:
    class Strange:
        pass

    assert connection_of(Strange()) is None


@pytest.fixture
def job_store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """The store of a job, which every node opens by itself."""
    store = dist.HashStore()
    monkeypatch.setattr("zeromon_agents.runtime.rendezvous.rendezvous_store", lambda: JobStore(store))
    return store


def node(folder: Path, name: str, port: int, named: bool) -> Path:
    """A run's folder on one node, with its collector's address beside it."""
    run = folder / name / "run"
    run.mkdir(parents=True)
    (run.parent / "collector.json").write_text(json.dumps({"host": "127.0.0.1", "port": port}))
    if named:
        (run / "name.json").write_text(json.dumps(["gpt-1", 5.0]))
    return run


def test_all_nodes_end_up_with_the_same_list(tmp_path: Path, job_store: dist.HashStore) -> None:
    """Also with a key that describes no node.

    The thread ends when all ranks are known.
    """
    JobStore(job_store).publish(b'{"node": []}')
    guard = Guard()
    runs = [node(tmp_path, f"n{n}", 9000 + n, n == 0) for n in range(3)]
    rendezvous = [Rendezvous(run, 2 * n, 2, 6, guard) for n, run in enumerate(runs)]
    for one in rendezvous:
        one.start()
    deadline = time.monotonic() + 20
    while any(t.name == "zeromon-rdzv" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = [json.loads((run / "nodes.json").read_bytes()) for run in runs]
    assert [[c["first_rank"] for c in sorted(f, key=lambda c: c["first_rank"])] for f in found] == [
        [0, 2, 4]
    ] * 3
    first = next(c for c in found[0] if c["first_rank"] == 0)
    assert first["address"] == "127.0.0.1:9000"
    assert {c["run"] for c in found[2]} == {"gpt-1", ""}
    assert (runs[0] / "nodes.json").stat().st_mode & 0o077 == 0
    assert guard.errors == 0


@pytest.mark.usefixtures("job_store")
def test_without_a_launcher_that_says_so_the_ranks_of_a_node_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of each node publishes it; where all ranks are on one node, none does."""
    monkeypatch.setattr("zeromon_agents.runtime.rendezvous._COUNT_SECONDS", 0.2)
    runs = [node(tmp_path, f"n{n}", 9000 + n, n == 0) for n in range(2)]
    for number, run in enumerate(runs):
        assert [is_first_on_node(run), is_first_on_node(run)] == [True, False]
        for rank in (2 * number, 2 * number + 1):
            (run / f"rank{rank}.1.ab.ring").touch()
    guard = Guard()
    for run, speaker in zip(runs, (1, 2), strict=True):
        Rendezvous(run, speaker, 0, 4, guard).start()
    alone = node(tmp_path, "alone", 9009, True)
    for rank in range(4):
        (alone / f"rank{rank}.1.ab.ring").touch()
    Rendezvous(alone, 0, 0, 4, guard).start()
    deadline = time.monotonic() + 20
    while any(t.name == "zeromon-rdzv" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for run in runs:
        cards = json.loads((run / "nodes.json").read_bytes())
        assert sorted((c["first_rank"], c["ranks"]) for c in cards) == [(0, 2), (2, 2)]
    assert not (alone / "nodes.json").exists()
    assert guard.errors == 0


def test_where_a_collector_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collector_at(tmp_path) == ""
    facts = tmp_path / "collector.json"
    facts.write_text("[]")
    assert collector_at(tmp_path) == ""
    facts.write_text(json.dumps({"host": "10.1.2.3", "port": 9417}))
    assert collector_at(tmp_path) == "10.1.2.3:9417"
    facts.write_text(json.dumps({"host": "0.0.0.0", "port": 9417}))
    monkeypatch.setenv("ZEROMON_ADVERTISE", "fd00::7")
    assert collector_at(tmp_path) == "[fd00::7]:9417"
    monkeypatch.delenv("ZEROMON_ADVERTISE")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert not collector_at(tmp_path).startswith("127.")  # no other node reaches that


CARD = {
    "node": "n0", "address": "10.0.0.1:9417", "first_rank": 0, "ranks": 2, "run": "gpt", "started": 5.0,
}  # fmt: skip


def published(card: dict[str, object]) -> bytes:
    return json.dumps(card).encode()


def test_only_a_holder_of_the_token_publishes_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a job has no authentication: whoever reaches its port can write into it."""
    signed = sign_node_card("secret", CARD)
    assert b"secret" not in published(signed)
    assert node_of(published(signed), "secret") == CARD
    assert node_of(published(sign_node_card("other", CARD)), "secret") is None
    assert node_of(published(CARD), "secret") is None
    assert node_of(published(signed | {"address": "10.9.9.9:1"}), "secret") is None
    assert node_of(published(signed | {"signature": 5}), "secret") is None
    assert node_of(b"[" * 100_000, "secret") is None
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    assert node_of(published(signed), "secret") is None, "of another job, two hours ago"


def test_a_false_node_that_comes_first_is_ignored_and_named(
    tmp_path: Path, job_store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROMON_TOKEN", "secret")
    evil = published(CARD | {"node": "evil", "address": "10.9.9.9:1", "first_rank": 0})
    JobStore(job_store).publish(evil)
    runs = [node(tmp_path, f"n{n}", 9000 + n, n == 0) for n in range(2)]
    for number, run in enumerate(runs):
        Rendezvous(run, 2 * number, 2, 4, Guard()).start()
    wait_for(lambda: not any(t.name == "zeromon-rdzv" for t in threading.enumerate()))
    for run in runs:
        cards = json.loads((run / "nodes.json").read_bytes())
        assert sorted(c["address"] for c in cards) == ["127.0.0.1:9000", "127.0.0.1:9001"]
        assert RunCluster(run).note == "published nodes ignored for another ZEROMON_TOKEN, or none: 1"
