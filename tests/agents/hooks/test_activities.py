"""What a loop does beside training is seen: checkpoints, evaluations, collections, compilation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch._dynamo.callback
from support import LAUNCH, Node, train_command

from zeromon.fold.ledger import LAUNCHER
from zeromon.readout.ledger import job_ledger
from zeromon.snapshot.ledger import Cause

TELLS_FRAMES = hasattr(torch._dynamo.callback, "CallbackArgs")
"""Whether dynamo tells which frame it has compiled, and with that whether for the first time."""
LOSSES = ("save", "dcp", "evaluate", "collect", "compile", "late")


def test_each_loss_has_the_time_that_the_program_measured(node: Node, tmp_path: Path) -> None:
    """Two ranks; each cause within 5 % of the program's clock, all causes within 0.5 % of the time."""
    truth = tmp_path / "truth"
    command = train_command(2, "20", *LOSSES, program="ledger.py")
    result = node.run(command, LEDGER_TRUTH=str(truth))
    assert result.code == 0, result.output
    waited = json.loads(Path(f"{truth}.0.1").read_text())["waiting"][1]
    for rank in result.snapshot.ranks:
        measured = json.loads(Path(f"{truth}.0.{rank.rank}").read_text())
        found = {str(row.cause): row.seconds for row in rank.ledger.rows}
        collections = [row for row in rank.ledger.activities if row.activity == "collect_all"]
        found["garbage_collection"] = collections[0].longest_seconds  # others happen by themselves
        for cause in ("checkpoint", "evaluation", "garbage_collection", "data"):
            assert found[cause] == pytest.approx(measured[cause][1], rel=0.05, abs=0.05), cause
        assert 1.2 <= found["compile"] <= measured["compile"][1]  # dynamo does more than it tells
        if rank.rank == 0:
            # on a busy machine rank 0 is late in some steps, too; tests/bench/bench_ledger.py compares
            assert found["waiting"] > 0.5 * waited
        lasted = json.loads(Path(f"{truth}.0.{rank.rank}").read_text())["process"][1]
        assert {"process groups", "zeromon", "model wrapping"} <= set(rank.ledger.startup_parts)
        assert sum(rank.ledger.startup_parts.values()) == pytest.approx(rank.ledger.startup_seconds)
        # the launcher's start and what follows the program's last line are no part of its own clock
        own = [row for row in rank.ledger.rows if row.cause != Cause.SHUT_DOWN and row.of != LAUNCHER]
        assert sum(row.seconds for row in own) == pytest.approx(lasted, rel=0.005, abs=0.05)
        counts = {(row.phase, row.activity): row.count for row in rank.ledger.activities}
        assert counts["checkpoint", "save"] == 3
        assert counts["evaluation", ""] == 2
        compiled = [counts.get(("compile", name), 0) for name in ("first_compile", "recompile")]
        assert compiled == ([1, 1] if TELLS_FRAMES else [2, 0])
        saved = next(row for row in rank.ledger.activities if row.activity == "save")
        assert saved.nbytes >= Path(f"{truth}.optimizer.{rank.rank}").stat().st_size
    assert job_ledger([result.snapshot]).notes == ()


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "cause"), [("collects", "garbage_collection"), ("saves", "checkpoint")]
)
def test_a_rank_that_is_late_for_one_activity_is_late_for_that(
    node: Node, tmp_path: Path, loss: str, cause: str
) -> None:
    """What one rank does beside training is named where the others wait for it, and is not "other"."""
    command = train_command(2, "30", loss, program="ledger.py")
    result = node.run(command, LEDGER_TRUTH=str(tmp_path / "truth"))
    assert result.code == 0, result.output
    [straggler] = result.snapshot.stragglers
    assert (straggler.rank, straggler.phases[:1]) == (0, (cause,))
    [finding] = [one for one in result.snapshot.findings if one.code == "ZM309"]
    assert f"per step ({cause.replace('_', ' ')})" in finding.text
    first, second = (
        {str(row.cause): row.seconds for row in rank.ledger.rows} for rank in result.snapshot.ranks
    )
    assert max(first, key=first.__getitem__) == cause
    assert max(second, key=second.__getitem__) == "waiting"


INFERENCE = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 4)).eval()
with torch.no_grad():
    for _ in range(20):
        model(torch.randn(2, 4))
        time.sleep(0.02)
"""


def test_a_program_that_only_evaluates_has_its_time(node: Node, tmp_path: Path) -> None:
    """No step, and no call of ``train()``: its last forward ends the evaluation."""
    script = tmp_path / "inference.py"
    script.write_text(INFERENCE)
    result = node.run([*LAUNCH, "2", str(script)])
    assert result.code == 0, result.output
    for rank in result.snapshot.ranks:
        (row,) = [row for row in rank.ledger.activities if row.phase == "evaluation"]
        assert row.count == 1 and row.seconds >= 19 * 0.02
