"""A change is tried in real ranks: losses stay bit-identical, and the ranks are as before."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from support import Node, train_command

from zeromon.ring.files import replace_file
from zeromon.ring.trial_words import MIN_BLOCK_STEPS, REQUEST, WORDS, Change, Plan
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.finding import TrialState

BEFORE, LEAD = 80, 20


def tried(node: Node, change: Change, blocks: int, timeout: float = 180) -> RunSnapshot:
    """Asks for a trial as soon as the first of two equal trainings is over."""
    first = BEFORE + LEAD
    steps = LEAD + blocks * MIN_BLOCK_STEPS + 10

    def look(run: RunSnapshot) -> None:
        folder: Path = node.root / run.run
        if (folder / REQUEST).exists():
            os.utime(folder / REQUEST)
        elif (
            run.ranks
            and len(run.ranks) == 2
            and min(rank.steps.last_step for rank in run.ranks) == BEFORE
        ):
            rings = tuple(sorted(path.name for path in folder.glob("rank*.ring")))
            plan = Plan(1, change, first, MIN_BLOCK_STEPS, blocks, rings)
            (folder / WORDS).write_bytes(bytes(16))
            with suppress(FileNotFoundError):
                replace_file(folder / REQUEST, json.dumps(plan._asdict()))

    command = train_command(2, str(BEFORE), str(steps), program="tried.py")
    result = node.run(command, seen=look, timeout=timeout)
    assert result.code == 0, result.output
    assert result.output.count("first difference None; open False") == 2, result.output
    for rank in result.snapshot.ranks:
        assert rank.agent.errors == 0
        assert rank.requests.trial is not None
        assert (rank.requests.trial.state, rank.requests.trial.step) == (
            TrialState.DONE,
            first + blocks * MIN_BLOCK_STEPS,
        )
    return result.snapshot


@pytest.mark.fsdp2
def test_a_trial_leaves_losses_bit_identical(node: Node) -> None:
    tried(node, Change.KEEP_GATHERED, 12)


@pytest.mark.long
@pytest.mark.fsdp2
@pytest.mark.parametrize("change", list(Change))
def test_a_thousand_switches(node: Node, change: Change) -> None:
    tried(node, change, 2000, timeout=2400)
