"""examples/train_gpt.py under every other strategy and option: it learns, and is told apart."""

from __future__ import annotations

import json
import statistics

import pytest
from support import LAUNCH, PROGRAMS, Node

CASES = {
    "fsdp1-grad-op": (2, ["--precision", "bf16", "--accumulate", "2"]),
    "fsdp1-hybrid": (4, []),
    "fsdp2-zero2": (2, ["--precision", "bf16", "--checkpoint"]),
    "ddp": (2, ["--precision", "bf16", "--accumulate", "3", "--checkpoint"]),
    "none": (1, ["--precision", "bf16"]),
}
STEPS = 24


@pytest.mark.parametrize(
    "strategy", [pytest.param(c, marks=pytest.mark.long) if c.startswith("fsdp1") else c for c in CASES]
)
def test_the_example_learns_and_is_watched(shared_node: Node, strategy: str) -> None:
    """The loss goes down; steps, micro-steps and strategy are seen."""
    ranks, words = CASES[strategy]
    out = shared_node.folder / f"example-{strategy}"
    program = [str(PROGRAMS / "train_counted.py"), "--out", str(out), "--strategy", strategy]
    launcher = [*LAUNCH, str(ranks if strategy != "none" else 0)]
    result = shared_node.run([*launcher, *program, "--steps", str(STEPS), *words])
    assert result.code == 0, result.output
    facts = json.loads((out / "0.json").read_text())
    losses = [float.fromhex(loss) for loss in facts["losses"]]
    assert statistics.mean(losses[-4:]) < statistics.mean(losses[:4]) - 0.2
    accumulate = int(words[words.index("--accumulate") + 1]) if "--accumulate" in words else 1
    for rank in result.snapshot.ranks:
        assert rank.steps.watched_steps == STEPS
        # a rank without process groups is watched from its first optimizer step on
        assert [s.micro_steps for s in rank.steps.recent][1:] == [accumulate] * (STEPS - 1)
        assert rank.strategy == ("one process" if strategy == "none" else strategy)
        assert rank.agent.errors == 0
        assert rank.communication.in_flight == ()
        assert rank.communication.unattributed == {}
    if strategy == "fsdp1-hybrid":
        groups = {(c.op, c.group_size) for c in result.snapshot.ranks[0].communication.collectives}
        assert ("all_gather", 2) in groups
        assert ("all_reduce", 2) in groups
    if strategy == "fsdp2-zero2":  # no reshard after forward: one gather a unit and step
        gathers = next(
            c for c in result.snapshot.ranks[0].communication.collectives if c.op == "all_gather"
        )
        assert gathers.count == 4 * STEPS
