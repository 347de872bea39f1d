"""Ranks that have not reported: which processes they are, where they stand, how they ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from builders import rank, run
from support import wait_for

from zeromon.cli.doctor import run_as_text
from zeromon.collector.attempts import Launched, max_restart_count
from zeromon.probes.process import find_py_spy, main_thread_frames
from zeromon.readout.report import render_run
from zeromon.readout.text import run_state
from zeromon.readout.verdict import Health, judge_run
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.run import DeathRole, RankProcess

LAUNCHER = """
import os, subprocess, sys
def start(rank, attempt, code):
    own = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(attempt - 1)}
    return subprocess.Popen([sys.executable, "-c", code], env=os.environ | own, stdin=subprocess.PIPE)
for line in sys.stdin:
    attempt = int(line)
    ranks = [start(n, attempt, "import sys; sys.stdin.read(); sys.exit(%d)" % (3 * n)) for n in (0, 1)]
    sys.stdin.readline()
    for one in ranks:
        one.stdin.close()
    for one in ranks:
        one.wait()
"""
"""Starts two ranks at a line with the number of an attempt, and ends them, rank 1 badly, at the next."""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, text=True)
    yield made
    made.kill()
    made.wait()


def tell(launcher: subprocess.Popen[str], line: str) -> None:
    assert launcher.stdin is not None
    launcher.stdin.write(f"{line}\n")
    launcher.stdin.flush()


def seen(watched: Launched, known: tuple[int, ...] = (), **facts: object) -> RunSnapshot:
    """The snapshot of a run without ranks."""
    watched.look((), time.monotonic_ns())
    made = replace(run(), taken_wall=95.0, started_wall=0.0, command=("torchrun",))
    return watched.with_unreported(replace(made, **facts), known, 0)


def test_ranks_are_known_before_they_report_and_attempts_that_never_do(
    launcher: subprocess.Popen[str],
) -> None:
    """Two attempts that end before any ring exists: counted, with the exit of the culprit."""
    watched = Launched(launcher.pid)
    assert judge_run(seen(watched)).text == "starting: no rank has reported after 95.00 s"
    tell(launcher, "1")
    shown = wait_for(lambda: len((found := seen(watched)).starting) == 2 and found)
    assert [(one.rank, one.attempt) for one in shown.starting] == [(0, 1), (1, 1)]
    pids = [one.pid for one in shown.starting]
    assert f"pids {pids[0]}, {pids[1]} are running" in judge_run(shown).text
    assert "no collective hangs" not in run_as_text(shown, (), {})
    assert f"rank 1 (pid {pids[1]}): has not reported yet" in run_as_text(shown, (), {})
    tell(launcher, "ends")
    ended = wait_for(lambda: (found := seen(watched)).attempts and found)
    (first,) = ended.attempts
    assert (first.number, first.steps, ended.starting, ended.restarting) == (1, 0, (), 0)
    (death,) = first.deaths
    assert (death.rank, death.role) == (1, DeathRole.CULPRIT)
    assert death.ended in ("exit code 3", "ended before it reported"), "by what the kernel tells"
    restarts = seen(watched, command=("torchrun", "--max-restarts", "1"))
    assert restarts.restarting == 2 and judge_run(restarts).health is Health.RESTARTING
    tell(launcher, "2")
    again = wait_for(lambda: len((found := seen(watched)).starting) == 2 and found)
    assert again.restarting == 2 and run_state(again) == "restarting, attempt 2"
    tell(launcher, "ends")
    over = wait_for(lambda: len((found := seen(watched, ended=True)).attempts) == 2 and found)
    judged = judge_run(over)
    assert judged.health is Health.DEAD
    assert "attempts 1 and 2 ended before a rank reported: rank 1" in judged.cause
    watched.look(pids, time.monotonic_ns())
    assert [one.number for one in seen(watched, known=(1,)).attempts] == [2], "these had reported"


def test_attempts_after_the_last_ranks_are_told(launcher: subprocess.Popen[str]) -> None:
    """The ranks of attempt 1 failed, and attempt 2 ended before a rank reported."""
    watched = Launched(launcher.pid)
    tell(launcher, "2")
    dead = rank(0, alive=False, failed=True, ended="exit code 17")
    starts = wait_for(lambda: (found := seen(watched, (1,), ranks=(dead,))).starting and found)
    assert judge_run(starts).health is Health.RESTARTING
    tell(launcher, "ends")
    over = wait_for(lambda: (found := seen(watched, (1,), ranks=(dead,), ended=True)).attempts and found)
    assert (over.attempt, over.last_attempt) == (1, 2)
    assert "attempt 1; attempt 2 ended before a rank reported: rank 1" in run_state(over)
    text = render_run(over)
    assert "Other attempts" in text and "attempt 2 ended: rank 1" in text


@pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")
def test_where_a_process_stands_is_read_from_outside(launcher: subprocess.Popen[str]) -> None:
    """The launcher itself waits in its loop."""
    # at first it imports
    wait_for(lambda: "".join(main_thread_frames(launcher.pid)[-1:]).startswith("<string>:6 in <module>"))
    process = RankProcess(pid=7, rank=0, attempt=1, at="train.py:21 in main")
    assert "pid 7 is at train.py:21 in main" in judge_run(replace(run(), starting=(process,))).text


@pytest.mark.parametrize(
    ("command", "restarts"),
    [
        ("torchrun --max-restarts 3 t.py", 3),
        ("torchrun --max_restarts=2 t.py", 2),
        ("torchrun t.py", 0),
        ("torchrun --max-restarts", 0),
    ],
)
def test_the_launcher_says_how_often_it_starts_again(command: str, restarts: int) -> None:
    assert max_restart_count(command.split()) == restarts
