"""Within two lines every view names the situation of a real run.

Hangs and stalls, killed ranks and leaks are judged where they are made: tests/runs/test_hangs.py,
test_faults.py and test_memory_death.py.
"""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import suppress
from dataclasses import replace

import pytest
from builders import changed
from first_lines import first_lines
from recordings import replay
from support import LAUNCH, PROGRAMS, Node

from zeromon.readout.text import run_state
from zeromon.readout.verdict import Health, Verdict
from zeromon.snapshot import RunSnapshot
from zeromon.tui import status_text
from zeromon.tui.line import plain_text

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
    ranks = tuple(changed(rank, alive=True, ended="") for rank in ended.ranks)
    judged = first_lines(replace(ended, ended=False, ranks=ranks))
    assert judged.health is health and cause in judged.cause, judged


def test_a_healthy_run_until_ctrl_c(node: Node) -> None:
    judged: list[Verdict] = []

    def seen(run: RunSnapshot) -> None:
        judged.append(first_lines(run))
        if len(run.ranks) == 2 and min(rank.steps.watched_steps for rank in run.ranks) >= 20:
            for rank in run.ranks:
                with suppress(ProcessLookupError):  # the snapshot may be older than its end
                    if rank.status.alive:
                        os.kill(rank.pid, signal.SIGINT)

    result = node.run([*LAUNCH, "2", TINY], STEPS="100", PAUSE="0.05", seen=seen)
    assert result.code != 0
    assert Health.HEALTHY in {one.health for one in judged}, judged
    last = first_lines(result.snapshot)
    assert last.health is Health.STOPPED and "stopped by Ctrl-C" in last.text, last


@pytest.mark.long
def test_a_restart_is_named_while_the_next_attempt_runs(node: Node) -> None:
    judged: list[tuple[str, str]] = []
    once = shlex.join([*LAUNCH, "2", TINY])
    command = ["bash", "-c", f"FAULT=kill {once}; {once}"]

    def seen(run: RunSnapshot) -> None:
        judged.append((first_lines(run).health, run_state(run)))
        if run.attempt == 2:
            assert "attempt 2" in plain_text(status_text.head_line(run))

    result = node.run(command, launched=True, seen=seen, STEPS="40", PAUSE="0.05")
    assert result.code == 0, result.output
    between = {state for health, state in judged if health == Health.DEAD}
    again = {state for health, state in judged if health != Health.DEAD and "attempt 2" in state}
    assert any("SIGKILL, after step" in state for state in between), set(judged)
    assert any(state.startswith("running, step") for state in again), set(judged)
    assert run_state(result.snapshot) == "finished after 40 steps, attempt 2"
