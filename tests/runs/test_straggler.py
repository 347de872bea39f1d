"""A rank that others wait for, on real runs and recordings: programs/slow_rank.py."""

from __future__ import annotations

import pytest
from recordings import replay
from support import LAUNCH, PROGRAMS, Node, Result

from zeromon.snapshot import RunSnapshot


def names_rank_1(node: Node, result: Result, phase: str) -> None:
    """From step 10 on rank 1 takes longer by a third of a step, in *phase*."""
    (late,) = result.snapshot.stragglers
    assert (late.rank, late.phases) == (1, (phase,))
    assert 2 <= late.since_step <= 13
    assert late.share > 0.1
    told = [f for f in result.snapshot.findings if f.rule == "straggler"]
    assert [f.rank for f in told] == [1]
    waits = node.metrics(result.run)["zeromon_wait_for_late_rank_seconds"]
    assert waits["0",] > 3 * waits["1",]


@pytest.mark.alone
def test_a_slow_rank_is_named_while_it_is_slow(node: Node) -> None:
    """A live run of FSDP2: within 30 steps of its becoming slow."""
    seen: list[RunSnapshot] = []
    command = [*LAUNCH, "2", str(PROGRAMS / "slow_rank.py"), "forward", "0.3"]
    result = node.run(command, seen=seen.append)
    assert result.code == 0, result.output
    names_rank_1(node, result, "forward")
    first = next(snapshot for snapshot in seen if snapshot.stragglers)
    assert first.ranks[0].steps.last_step <= 40


def test_a_rank_that_waits_for_its_data_is_named_with_that_phase(node: Node) -> None:
    names_rank_1(node, replay(node, "straggler-data"), "data_wait")


def test_under_ddp_arrival_is_when_a_bucket_is_complete(node: Node) -> None:
    """DDP's collectives are issued from C++: only the reducer knows when."""
    names_rank_1(node, replay(node, "straggler-ddp"), "forward")


def test_a_healthy_run_accuses_nobody(node: Node) -> None:
    snapshot = replay(node, "straggler-none").snapshot
    assert [rank.steps.watched_steps for rank in snapshot.ranks] == [60, 60]
    assert snapshot.stragglers == ()
    assert {f.rule for f in snapshot.findings if f.severity != "info"} == set()


@pytest.mark.alone
def test_a_rank_that_shares_its_cpu_is_told_so(node: Node) -> None:
    """A busy process beside rank 1, on the same CPU: who takes it is named, and nobody else is late."""
    told: set[tuple[int, str]] = set()

    def look(snapshot: RunSnapshot) -> None:
        told.update((f.rank, f.text) for f in snapshot.findings if f.code == "ZM605")
        assert all((late.rank, late.cause != "") == (1, True) for late in snapshot.stragglers)

    command = [*LAUNCH, "2", str(PROGRAMS / "slow_rank.py"), "cpu", "0", "160"]
    result = node.run(command, seen=look)
    assert result.code == 0, result.output
    assert any(rank == 1 and "while True: pass (pid " in text for rank, text in told), told
