"""Live overlap and exposed time against a communication whose hidden share is known."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from recordings import facts_of, replay
from support import LAUNCH, PROGRAMS, Node, Result

LONG = [pytest.param(hidden, marks=pytest.mark.long) for hidden in (0.0, 0.5, 0.75)]


@pytest.mark.alone
@pytest.mark.parametrize("hidden", [0.25, *LONG])
def test_live_overlap_is_within_five_percent_of_the_truth(node: Node, hidden: float) -> None:
    """100 ms of communication, so many of them hidden."""
    late = 100.0
    busy = hidden * late
    program = [*LAUNCH, "2", str(PROGRAMS / "overlap.py"), str(late), str(busy)]
    truth_file = node.folder / "truth.json"
    result = node.run(program, TRUTH=str(truth_file))
    assert result.code == 0, result.output
    agrees(result, json.loads(truth_file.read_text()), hidden)


def test_overlap_of_nearly_all_is_within_five_percent_of_the_truth(node: Node) -> None:
    agrees(replay(node, "overlap-0.9"), facts_of("overlap-0.9")["measured"], 0.9)


def agrees(result: Result, truth: list[Any], hidden: float) -> None:
    """The snapshot says what the program has measured around the same calls."""
    rank = result.snapshot.ranks[0]
    row = next(c for c in rank.communication.collectives if c.op == "all_reduce")
    timed = [t for n, t in enumerate(truth, 1) if not rank.steps.recent[n - 1].idle]
    waited = sum(left - reached for _, reached, left in timed)
    assert row.exposed_seconds == pytest.approx(waited, rel=0.05)
    assert row.seconds == pytest.approx(sum(left - issued for issued, _, left in timed), rel=0.05)
    assert 1 - row.exposed_seconds / row.seconds == pytest.approx(hidden, abs=0.05)
    # rank 1 comes late: what rank 0's collectives last is waiting for it, and hardly any transfer
    waits, late = (
        next(t for t in r.communication.traffic if t.op == "all_reduce") for r in result.snapshot.ranks
    )
    assert waits.wait_seconds is not None and late.wait_seconds is not None
    assert waits.transfer_seconds is not None
    parts = waits.wait_seconds + waits.transfer_seconds
    assert parts == pytest.approx(waits.seconds, rel=0.05)
    assert waits.wait_seconds > 0.8 * waits.seconds
    assert late.wait_seconds < 0.05 * waits.wait_seconds
    assert statistics.median(s.exposed_ns for s in rank.steps.recent if not s.idle) > 0


def test_a_collective_that_is_wholly_hidden_ends_before_it_is_waited_for(node: Node) -> None:
    """40 ms of communication behind 120 ms of compute: its duration is 40, its exposure none."""
    rank = replay(node, "overlap-hidden").snapshot.ranks[0]
    row = next(c for c in rank.communication.collectives if c.op == "all_reduce")
    assert row.seconds / row.timed == pytest.approx(0.040, rel=0.25)
    assert row.exposed_seconds < 0.02 * row.seconds
