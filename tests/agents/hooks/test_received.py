"""Tokens and samples of a run equal the program's own arithmetic, whatever divides model and batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import run
from support import PROGRAMS, ROOT

from zeromon.collector.rank import RankFollower
from zeromon.export.prometheus.metrics import METRICS, rows_of
from zeromon.fold.summarize import summarize_rank
from zeromon.readout.throughput import samples_per_step, tokens_per_step
from zeromon.snapshot import RankSnapshot, RunSnapshot

STEPS = 6
Counted = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Counted]]:
    folder: Path = tmp_path_factory.mktemp("received")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {
        "ZEROMON_COLLECTOR": "off", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "agents"))),
    }  # fmt: skip
    ran = subprocess.run(
        [*launch, str(PROGRAMS / "received.py"), str(folder)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return folder, [json.loads((folder / f"{n}.json").read_text()) for n in range(2)]


def snapshot(folder: Path) -> RunSnapshot:
    def rank_of(ring: Path) -> RankSnapshot:
        follower = RankFollower(ring)
        follower.poll()
        return summarize_rank(follower.state)

    return run(*sorted(map(rank_of, folder.glob("*.ring")), key=lambda rank: rank.rank))


@pytest.mark.fsdp2
@pytest.mark.parametrize(("strategy", "divided"), [("ddp", 1), ("fsdp2", 1), ("fsdp2_tp", 2)])
def test_tokens_are_those_of_the_programs_arithmetic(
    trained: tuple[Path, list[Counted]], strategy: str, divided: int
) -> None:
    """Packed, padded and accumulated; evaluations do not count; ranks of a tensor count once."""
    folder, counted = trained
    made = snapshot(folder / strategy)
    assert [rank.agent.errors for rank in made.ranks] == [0, 0]
    for name, of_step in (("samples", samples_per_step), ("tokens", tokens_per_step)):
        own = [facts[strategy][name] for facts in counted]
        assert [getattr(rank.training.batches, name) for rank in made.ranks] == own
        assert of_step(made) == pytest.approx(sum(own) / STEPS / divided)
        metric = next(m for m in METRICS if m.name == f"zeromon_{name}_total")
        exported = [value or 0 for r in made.ranks for _, value in rows_of(metric, made)(r)]
        assert sum(exported) == sum(own) / divided
