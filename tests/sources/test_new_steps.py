"""The new steps of all nodes: each once, again after a failure, of a lost node later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import MS, rank, run, summary
from served import Fixed

from zeromon.base.errors import SourceError
from zeromon.collector.http import start_http_server
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.run import NodeView
from zeromon.sources import live
from zeromon.sources.live import LiveSource, NewSteps
from zeromon.storage.run_store import StepQuery
from zeromon.storage.step_history.rows import NAMES, row_of


class Collector(LiveSource):
    """A collector whose ranks have taken *steps* steps each."""

    def __init__(self, node: str, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        super().__init__(f"{node}:9417", "train-1")
        self.ranks, self.steps, self.answers = ranks, 0, True
        self.asked: list[int] = []
        views = [
            NodeView(node=name, address=f"{name}:9417", here=name == node, first_rank=2 * n, ranks=2)
            for n, name in enumerate(nodes)
        ]
        self.snapshot = run(*map(rank, ranks), nodes=tuple(views))

    def latest(self) -> RunSnapshot:
        if not self.answers:
            raise SourceError("no collector answers")
        return self.snapshot

    def series(self, query: StepQuery = StepQuery()) -> dict[str, list[Any]]:  # noqa: B008
        self.asked.append(query.since_us)
        rows = [
            row_of(number, summary(step), 0)
            for number in self.ranks
            for step in range(1, self.steps + 1)
            if summary(step).start_ns // 1000 >= query.since_us
        ]
        columns: Any = zip(*rows, strict=True) if rows else [()] * len(NAMES)
        return {name: list(values) for name, values in zip(NAMES, columns, strict=True)}


@pytest.fixture
def collectors(monkeypatch: pytest.MonkeyPatch) -> list[Collector]:
    names = ("n0", "n1")
    found = [Collector(name, (2 * n, 2 * n + 1), names) for n, name in enumerate(names)]
    monkeypatch.setattr(live, "LiveSource", lambda *_, signs: found[1])
    return found


def read(steps: NewSteps) -> list[tuple[int, int]]:
    steps.run()
    return sorted((row["step"], row["rank"]) for row in steps.rows())


def test_each_step_of_each_node_is_read_once(collectors: list[Collector]) -> None:
    steps = NewSteps(collectors[0])
    assert [r.rank for r in steps.run().ranks] == [0, 1, 2, 3] and read(steps) == []
    for one in collectors:
        one.steps = 2
    assert read(steps) == read(steps) == [(step, rank) for step in (1, 2) for rank in range(4)]
    steps.kept()
    assert read(steps) == []
    collectors[0].steps = 3
    assert read(steps) == [(3, 0), (3, 1)]
    assert collectors[0].asked[-1] == 200 * MS // 1000  # the record is not read anew


def test_a_node_that_does_not_answer_is_left_out_until_it_does(collectors: list[Collector]) -> None:
    steps = NewSteps(collectors[0])
    collectors[0].steps = collectors[1].steps = 1
    collectors[1].answers = False
    assert read(steps) == [(1, 0), (1, 1)]
    steps.kept()
    collectors[1].answers = True
    assert read(steps) == [(1, 2), (1, 3)]


def test_the_first_node_is_needed(collectors: list[Collector]) -> None:
    collectors[0].answers = False
    with pytest.raises(SourceError):
        NewSteps(collectors[0]).run()


@pytest.mark.parametrize("token", ["another", "same"])
def test_a_node_that_refuses_to_be_read_is_named(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector of an earlier version knows no signed reads, and refuses them as a wrong token."""
    monkeypatch.setenv("ZEROMON_TOKEN", "same")
    first = Collector("n0", (0, 1), ("n0", "n1"))
    server = start_http_server(Fixed(run(rank(2))), "127.0.0.1", 0, token)  # type: ignore[arg-type]
    here, there = first.snapshot.nodes
    there = replace(there, address=f"127.0.0.1:{server.server_port}")
    first.snapshot = replace(first.snapshot, nodes=(here, there))
    steps = NewSteps(first)
    try:
        found = steps.run()
    finally:
        server.shutdown()
    refused = token == "another"
    assert [one.rank for one in found.ranks] == ([0, 1] if refused else [0, 1, 2])
    assert ("left out: n1, whose collectors" in steps.left_out) == refused
    assert bool(steps.left_out) == refused
