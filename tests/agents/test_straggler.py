"""A rank that others wait for, on real runs of FSDP2: programs/slow_rank.py."""

from __future__ import annotations

import pytest
from support import LAUNCH, PROGRAMS, Node

from zeromon.snapshot import RunSnapshot

pytestmark = pytest.mark.alone

PHASE = {"data": "data_wait", "forward": "forward"}


@pytest.mark.parametrize("where", ["none", "data", "forward"])
def test_a_slow_rank_is_named_with_where_it_is_slow(node: Node, where: str) -> None:
    """From step 10 on rank 1 takes longer by a third of a step; a healthy run accuses nobody."""
    seen: list[RunSnapshot] = []
    command = [*LAUNCH, "2", str(PROGRAMS / "slow_rank.py"), where, "0.3"]
    result = node.run(command, seen=seen.append)
    assert result.code == 0, result.output
    if where == "none":
        # a rank that another process keeps from its CPU is late, and why is said
        assert [s for picture in seen for s in picture.stragglers if not s.cause] == []
        told = {(f.rule, f.severity) for picture in seen for f in picture.findings}
        # that the machine is shared is said truly where it is
        said = {rule for rule, severity in told if severity != "info"}
        assert said <= {"cpu_starved", "straggler"}
        return
    (late,) = result.snapshot.stragglers
    assert (late.rank, late.phase) == (1, PHASE[where])
    assert 2 <= late.since_step <= 13
    assert late.share > 0.1
    first = next(picture for picture in seen if picture.stragglers)
    assert first.ranks[0].step <= 40
    told = [f for f in result.snapshot.findings if f.rule == "straggler"]
    assert [f.rank for f in told] == [1]
    waits = node.metrics(result.run)["zeromon_wait_for_late_rank_seconds"]
    assert waits["0",] > 3 * waits["1",]


def test_under_ddp_arrival_is_when_a_bucket_is_complete(node: Node) -> None:
    """DDP's collectives are issued from C++: only the reducer knows when."""
    command = [*LAUNCH, "2", str(PROGRAMS / "slow_rank.py"), "forward", "0.3", "60", "ddp"]
    result = node.run(command)
    assert result.code == 0, result.output
    (late,) = result.snapshot.stragglers
    assert (late.rank, late.phase) == (1, "forward")
    assert late.share > 0.1


def test_a_rank_that_shares_its_cpu_is_told_so(node: Node) -> None:
    """A busy process beside rank 1, on the same CPU: the forward takes longer, and why is the host."""
    result = node.run([*LAUNCH, "2", str(PROGRAMS / "slow_rank.py"), "cpu", "0", "80"])
    assert result.code == 0, result.output
    (late,) = result.snapshot.stragglers
    assert (late.rank, late.phase) == (1, "forward")
    assert late.cause.startswith("its main thread had no CPU to run on for ")
    (told,) = [f for f in result.snapshot.findings if f.rule == "straggler"]
    assert late.cause in told.text
