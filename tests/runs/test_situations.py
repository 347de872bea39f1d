"""Within two lines every view names the situation of a real run.

Hangs and stalls, killed ranks and leaks are judged where they are made: tests/runs/test_hangs.py,
test_faults.py and test_memory_death.py.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from first_lines import first_lines
from recordings import replay
from support import LAUNCH, PROGRAMS, Node

from zeromon.readout.verdict import Health, Verdict
from zeromon.snapshot import RunSnapshot

TINY = str(PROGRAMS / "tiny.py")


@pytest.mark.parametrize(
    ("name", "health", "cause"),
    [
        ("straggler-none", Health.HEALTHY, "of a step"),
        ("advised-data-before", Health.SLOW, "wait for the next batch"),
        ("straggler-data", Health.SLOW, "rank 1"),
        ("exposed-fsdp2-off", Health.SLOW, "waits for communication"),
    ],
)
def test_a_recorded_run_is_named_as_it_was_before_its_end(
    node: Node, name: str, health: Health, cause: str
) -> None:
    ended = replay(node, name).snapshot
    assert first_lines(ended).health is Health.FINISHED
    ranks = tuple(replace(rank, alive=True, ended="") for rank in ended.ranks)
    judged = first_lines(replace(ended, ended=False, ranks=ranks))
    assert judged.health is health and cause in judged.cause, judged


def test_a_healthy_run_until_ctrl_c(node: Node) -> None:
    judged: list[Verdict] = []

    def seen(run: RunSnapshot) -> None:
        judged.append(first_lines(run))
        if len(run.ranks) == 2 and min(rank.steps for rank in run.ranks) >= 20:
            for rank in run.ranks:
                if rank.alive:
                    os.kill(rank.pid, signal.SIGINT)

    result = node.run([*LAUNCH, "2", TINY], STEPS="100", PAUSE="0.05", seen=seen)
    assert result.code != 0
    assert Health.HEALTHY in {one.health for one in judged}, judged
    last = first_lines(result.snapshot)
    assert last.health is Health.STOPPED and "stopped by Ctrl-C" in last.cause, last
