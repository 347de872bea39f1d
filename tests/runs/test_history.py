"""The history that a real run leaves: every step of every rank, once, as the live view had it."""

from __future__ import annotations

import pytest
from support import Node, load_all_rows, train_command

from zeromon.collector.daemon import Collector
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.step import IDLE

STEPS = 60


def test_every_step_is_kept_also_when_the_collector_is_started_again(node: Node) -> None:
    """A second one reads the rings from their beginning, and writes on where the first ended."""
    restarted = False

    def look(run: RunSnapshot) -> None:
        nonlocal restarted
        if (
            not restarted
            and run.ranks
            and min(rank.steps.watched_steps for rank in run.ranks) >= STEPS // 3
        ):
            restarted = True
            node.collector = Collector(node.root, node.store)

    command = train_command(2, "ddp", "on", str(STEPS), program="exposed.py")
    result = node.run(command, seen=look)
    assert result.code == 0 and restarted, result.output
    whole, broken = load_all_rows(node.store.history(result.run))
    assert broken == ()
    for rank in result.snapshot.ranks:
        mine = whole.filter(whole["rank"] == rank.rank).sort("step")
        assert mine["step"].to_list() == list(range(1, STEPS + 1))
        by_step = {step.step: step for step in rank.steps.recent}
        for row in mine.iter_rows(named=True):
            step = by_step[row["step"]]
            assert row["duration_us"] == (step.end_ns - step.start_ns) // 1000
            assert bool(row["flags"] & IDLE) == step.idle
            # DDP's communication is told with the next step: it has been waited for
            assert row["exposed_us"] == step.exposed_ns // 1000
            assert row["collective_bytes"] == step.collective_bytes
        assert mine["start_us"][0] / 1e6 == pytest.approx(result.snapshot.started_wall, abs=60)


def test_without_room_the_history_stops_and_the_run_goes_on(node: Node) -> None:
    """A file stands where its folder should be: said as a finding, and nothing else is lost."""
    blocked = node.store.runs / "blocked"
    blocked.mkdir(parents=True)
    (blocked / "history").write_text("in the way")
    command = train_command(1, "none", "30", program="profiled.py")
    result = node.run(command, run="blocked")
    assert result.code == 0
    assert [f.rule for f in result.snapshot.findings if f.rule == "history_stopped"]
    assert result.snapshot.ranks[0].steps.watched_steps == 30
    assert (blocked / "snapshot.json").exists()
