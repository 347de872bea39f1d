"""FSDP2 on a second type of accelerator: the same example, timed by events of the device."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support import LAUNCH, ROOT, Node

DEVICE = Path(__file__).parent / "threads.py"
EXAMPLE = [
    str(ROOT / "examples" / "train_gpt.py"),
    *"--steps 12 --log-every 1 --width 32 --layers 2 --heads 2 --length 32 --batch 2".split(),
]


@pytest.mark.long
@pytest.mark.fsdp2
@pytest.mark.skipif(not shutil.which("ninja"), reason="ninja and a C++ compiler build the device")
def test_the_fsdp2_example_on_another_type_of_device(node: Node) -> None:
    """Losses equal the CPU's; collectives, units and waits are timed by the events of the device."""
    plain = node.run([*LAUNCH, "2", *EXAMPLE], watched=False)
    result = node.run([*LAUNCH, "2", str(DEVICE), *EXAMPLE], timeout=600)
    assert result.code == 0, result.output
    losses = re.findall(r"step +\d+  loss [\d.]+", result.output)
    assert losses == re.findall(r"step +\d+  loss [\d.]+", plain.output) and len(losses) == 12
    for rank in result.snapshot.ranks:
        assert (rank.device, rank.strategy, rank.agent.errors) == ("threads:0", "fsdp2", 0)
        assert (
            rank.steps.watched_steps == 12
            and rank.communication.exposed_seconds is not None
            and rank.communication.untimed_ratio == 0
        )
        gathers = [row for row in rank.communication.traffic if row.op == "all_gather" and row.unit]
        assert {row.unit for row in gathers} >= {"layers.0", "layers.1"}
        assert all(row.seconds > 0 for row in gathers)
        assert 0 < rank.communication.exposed_seconds < (rank.steps.mean_seconds or 0.0)
