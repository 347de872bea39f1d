"""What goes wrong, and what is left of it: training is never hurt, the record is never lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from first_lines import first_lines
from support import (
    ASKED,
    LAUNCH,
    PROGRAMS,
    ROOT,
    Node,
    clean_environment,
    fork_server,
    free_port,
    start,
    wait_for,
)

from zeromon.collector.run import snapshot_of_folder
from zeromon.readout.ledger import job_ledger
from zeromon.readout.report import render_run
from zeromon.readout.verdict import Health
from zeromon.ring.buffer import RingReader
from zeromon.ring.codes import Kind
from zeromon.ring.events import kind_of_record
from zeromon.sources.live import collector_address, runs_at_address

TINY = str(PROGRAMS / "tiny.py")
TWO = [*LAUNCH, "2", TINY]
PYTHON = sys.executable


def losses(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d loss -?\d+\.\d{6}", output))


@pytest.mark.parametrize(
    ("fault", "text"),
    [("import", "injected at import"), ("before-init", "injected before init_process_group")],
)
def test_a_script_that_dies_before_it_is_a_rank_leaves_no_ring(
    node: Node, fault: str, text: str
) -> None:
    """Its own traceback shows, once a process, and the run's record says that nobody reported."""
    result = node.run(TWO, FAULT=fault)
    assert result.code == 1
    assert text in result.output
    assert "zeromon" not in result.output.replace(str(node.folder), "").replace(str(ROOT), "")
    assert result.newest is None


def test_an_exception_in_a_step_is_in_the_record(node: Node) -> None:
    """Rank, text, last step; the other rank is stopped by the launcher."""
    result = node.run(TWO, FAULT="mid-step")
    assert result.code == 1
    first = result.snapshot.ranks[0]
    assert (first.status.failed, first.status.ended, first.steps.last_step) == (True, "exception", 2)
    assert first.status.exception == "RuntimeError at tiny.py:57: injected in a step"
    report = render_run(result.snapshot)
    assert "rank 0: exception; last seen in step 3" in report
    cause = "rank 0: RuntimeError at tiny.py:57: injected in a step (after step 2"
    assert cause in report.splitlines()[1]


@pytest.mark.parametrize(
    ("fault", "ended"), [("exit", "exit code 7"), ("os-exit", "exit code 9"), ("kill", "SIGKILL")]
)
def test_a_rank_that_goes_is_named_with_how_it_went(node: Node, fault: str, ended: str) -> None:
    """By its exit status where the kernel tells it, else by what is known."""
    result = node.run(TWO, FAULT=fault, WHO="1")
    assert result.code != 0
    rank = result.snapshot.ranks[1]
    assert rank.steps.last_step == 2
    assert rank.status.ended in (ended, "killed without a final record (SIGKILL or a crash)", "ended")
    if fault != "exit":
        assert rank.status.failed
        judged = first_lines(result.snapshot)
        # where the launcher has killed rank 0 before anybody looked, neither was the first
        is_first = "rank 1" in judged.cause or result.snapshot.ranks[0].status.ended == rank.status.ended
        assert judged.health is Health.DEAD and is_first, judged


def test_the_record_of_a_killed_rank_is_whole_up_to_its_last_event(node: Node) -> None:
    """kill -9 in mid-step: all events that the process had written are in the ring."""
    environment = node.environment("r", STEPS="2000", PAUSE="0.01")
    environment["ZEROMON_COLLECTOR"] = "off"
    training = start(TWO, environment, stderr=subprocess.DEVNULL)
    folder = node.root / "r"
    ring = wait_for(lambda: next(iter(folder.glob("rank1.*.ring")), None))
    reader = RingReader(ring)
    wait_for(lambda: any(kind_of_record(raw) == Kind.STEP and raw[3] >= 20 for raw in reader.read()))
    pid = reader.header.pid
    os.kill(pid, signal.SIGSTOP)
    # once all threads stand it writes nothing, so we know its last event
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    wait_for(lambda: all(") T " in (task / "stat").read_text() for task in tasks))
    last = RingReader(ring).newest()
    os.kill(pid, signal.SIGKILL)
    training.wait(timeout=60)
    records = RingReader(ring).read(final=True)
    assert [raw[0] for raw in records] == list(range(1, last + 1))
    snapshot = snapshot_of_folder(folder)
    assert snapshot.ranks[1].status.failed
    assert snapshot.ranks[1].steps.last_step >= 20


def test_without_a_folder_for_a_ring_training_goes_on_and_the_user_is_told(node: Node) -> None:
    """Once a process, with a way out, and the same losses."""
    bare = node.run(TWO, watched=False)
    result = node.run(TWO, ZEROMON_RUN_DIR="/proc/nowhere/r")
    assert result.code == 0, result.output
    assert losses(result.output) == losses(bare.output)
    assert result.output.count("this process is not watched") == 2
    assert "ZEROMON_DIR" in result.output
    assert "Traceback" not in result.output


def test_two_runs_at_once_do_not_mix(node: Node) -> None:
    """Same node, same collector, each its own ranks."""
    environments = [node.environment(name, PAUSE="0.05") for name in ("a", "b")]
    both = [start(TWO, e) for e in environments]
    assert [p.wait(timeout=120) for p in both] == [0, 0]
    for name in ("a", "b"):
        snapshot = node.settle(name)
        assert snapshot is not None
        assert [(r.rank, r.steps.watched_steps) for r in snapshot.ranks] == [(0, 5), (1, 5)]


def start_run(node: Node, port: int, **extra: str) -> subprocess.Popen[str]:
    environment = clean_environment() | {
        "ZEROMON_DIR": str(node.root),
        "ZEROMON_STORE": str(node.folder / "store"),
        **extra,
    }
    fork_server(with_deepspeed=False)
    ranks = [*ASKED, "2", TINY]
    command = [PYTHON, "-m", "zeromon", "run", "--name", "r", "--port", str(port), "--", *ranks]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip


@pytest.mark.long
def test_a_taken_port_is_said_and_the_next_one_serves(node: Node) -> None:
    """The run is watched all the same."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        training = start_run(node, port)
        _, narration = training.communicate(timeout=120)
    assert training.returncode == 0
    assert f"port {port} is taken" in narration
    snapshot = wait_for(lambda: node.store.names() and node.store.load("r"))
    assert [r.rank for r in snapshot.ranks] == [0, 1]


def test_a_killed_collector_is_started_again_and_loses_nothing(node: Node) -> None:
    """An agent notices; the new one reads the rings from their beginning."""
    training = start_run(node, free_port(), STEPS="70", PAUSE="0.1")
    wait_for(lambda: (node.root / "r" / "run.json").exists(), pause=0.002)
    began = time.monotonic()
    address = wait_for(lambda: collector_address(node.root))
    wait_for(lambda: any(run.step >= 5 for run in runs_at_address(address)))
    pid = json.loads((node.root / "collector.json").read_text())["pid"]
    (node.root / "collector.json").write_text("{}")
    os.kill(pid, signal.SIGKILL)
    again = wait_for(lambda: collector_address(node.root))
    steps = wait_for(lambda: [run.step for run in runs_at_address(again) if run.step >= 10])
    assert steps[0] >= 10
    training.communicate(timeout=120)
    lasted = time.monotonic() - began
    assert training.returncode == 0
    snapshot = wait_for(lambda: ended_record(node))
    counted = [(r.rank, r.steps.watched_steps, r.agent.dropped) for r in snapshot.ranks]
    assert counted == [(0, 70, 0), (1, 70, 0)]
    whole = job_ledger([snapshot])
    trained = [rank.steps.recent[-1].end_ns / 1e9 - began for rank in snapshot.ranks]
    # on a busy machine the command ends some time after its ranks
    assert 0.99 * sum(trained) <= whole.rank_seconds, "the ledger misses time"
    assert whole.rank_seconds <= 1.01 * 2 * lasted
    assert sum(row.seconds for row in whole.rows) == pytest.approx(whole.rank_seconds)


def ended_record(node: Node):  # type: ignore[no-untyped-def]
    if not node.store.names():
        return None
    snapshot = node.store.load("r")
    return snapshot if snapshot.ended else None


def test_a_report_works_when_ranks_and_collector_are_dead(node: Node) -> None:
    """Straight from the rings: `zeromon report` on a run that nobody follows."""
    node.run(TWO, run="orphan", FAULT="kill", WHO="0", timeout=90)
    dead = node.folder / "again"
    # the collector of this node has recorded it; a fresh one would find it in the store alone
    done = subprocess.run(
        [PYTHON, "-m", "zeromon", "report", "orphan"],
        env=clean_environment()
        | {"ZEROMON_DIR": str(dead), "ZEROMON_STORE": str(node.folder / "store")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    # the launcher ends the other rank within a millisecond: which one went first is not recorded
    assert re.search(r"died: rank [01]", done.stdout)
    assert Path(node.folder / "store" / "runs" / "orphan" / "snapshot.json").exists()


def test_rings_that_nobody_follows_are_reported(node: Node) -> None:
    """No collector ever ran; the rings are all there is."""
    environment = node.environment("lonely", FAULT="kill", WHO="0")
    start(TWO, environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait(90)
    done = subprocess.run(
        [PYTHON, "-m", "zeromon", "report"],
        env=clean_environment()
        | {"ZEROMON_DIR": str(node.root), "ZEROMON_STORE": str(node.folder / "none")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"run lonely: died: rank [01]", done.stdout)
