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
from support import LAUNCH, PROGRAMS, ROOT, Node, clean_environment

from zeromon.cli import main
from zeromon.collector import read_folder
from zeromon.events import Kind
from zeromon.report import render
from zeromon.ring import RingReader
from zeromon.source import collector_address, runs_at

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
    assert "zeromon" not in result.output.replace(str(node.folder), "")
    assert result.picture is None


def test_an_exception_in_a_step_is_in_the_record(node: Node) -> None:
    """Rank, text, last step; the other rank is stopped by the launcher."""
    result = node.run(TWO, FAULT="mid-step")
    assert result.code == 1
    first = result.snapshot.ranks[0]
    assert (first.failed, first.ended, first.step) == (True, "exception", 2)
    assert first.exception == "RuntimeError: injected in a step"
    report = render(result.snapshot)
    assert "rank 0: exception; last seen in step 3" in report
    assert "RuntimeError: injected in a step" in report


@pytest.mark.parametrize(
    ("fault", "ended"), [("exit", "exit code 7"), ("os-exit", "exit code 9"), ("kill", "SIGKILL")]
)
def test_a_rank_that_goes_is_named_with_how_it_went(node: Node, fault: str, ended: str) -> None:
    """By its exit status where the kernel tells it, else by what is known."""
    result = node.run(TWO, FAULT=fault, WHO="1")
    assert result.code != 0
    rank = result.snapshot.ranks[1]
    assert rank.step == 2
    assert rank.ended in (ended, "killed without a word (SIGKILL or a crash)", "ended")
    if fault != "exit":
        assert rank.failed


def test_the_record_of_a_killed_rank_is_whole_up_to_its_last_event(node: Node) -> None:
    """kill -9 in mid-step: all events that the process had written are in the ring."""
    environment = node.environment("r", STEPS="2000", PAUSE="0.01")
    environment["ZEROMON_COLLECTOR"] = "off"
    training = subprocess.Popen(TWO, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)
    folder = node.root / "r"
    ring = wait_for(lambda: next(iter(folder.glob("rank1.*.ring")), None))
    reader = RingReader(ring)
    wait_for(lambda: any(raw[2] == Kind.STEP and raw[8] >= 20 for raw in reader.read()))
    pid = reader.header.pid
    os.kill(pid, signal.SIGSTOP)  # from here on it writes nothing, so we know its last event
    time.sleep(0.2)
    last = RingReader(ring).newest()
    os.kill(pid, signal.SIGKILL)
    training.wait(timeout=60)
    records = RingReader(ring).read(final=True)
    assert [raw[0] for raw in records] == list(range(1, last + 1))
    picture = read_folder(folder)
    assert picture.ranks[1].failed
    assert picture.ranks[1].step >= 20


def wait_for(question, timeout: float = 60.0):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        answer = question()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError("it did not happen")


HANGS = {
    "late": ("a member has not come", (0,), (1,)),
    "op": ("mismatched operations", (0,), ()),
    "deadlock": ("deadlock of groups", (0,), (1,)),
}


@pytest.mark.parametrize("kind", HANGS)
def test_a_hung_collective_is_visible_while_it_hangs(
    node: Node, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within seconds: which one, who waits, who has not come; as a finding, a metric, by the doctor."""
    environment = node.environment("r")
    program = [*LAUNCH, "2", str(PROGRAMS / "hang.py"), kind]
    training = subprocess.Popen(program, env=environment, cwd=ROOT)
    try:

        def hanging() -> object:
            node.collector.tick()
            picture = node.picture("r")
            rules = {f.rule for f in picture.findings} if picture else set()
            return picture if "collective_in_flight" in rules else None

        picture = wait_for(hanging)
        hang = next(h for h in picture.hangs if h.group == "world")
        # who sends a broadcast may be out of it already, or not
        waiting = tuple(rank for rank in hang.waiting if rank == 0 or kind != "op")
        assert (hang.kind, waiting, hang.missing) == HANGS[kind]
        # of two operations that is named which was called first
        assert hang.op == "all_reduce" or (kind == "op" and hang.op == "broadcast")
        assert (hang.sequence, hang.nbytes) == (4, 64)
        assert 10 < hang.seconds < 15
        metrics = node.metrics("r")
        assert metrics["zeromon_collective_in_flight_seconds"]["0",] > 10
        roles = {
            (rank, role)
            for rank, group, named, op, role in metrics["zeromon_hang"]
            if (group, named, op) == (hang.group, hang.kind, hang.op)
        }
        assert {("0", "waiting")} <= roles
        assert (("1", "missing") in roles) == (kind != "op")
        assert main(["doctor", node.address]) == 1
        text = capsys.readouterr().out
        assert hang.kind in text and "Python stack of rank" in text
    finally:
        training.send_signal(signal.SIGTERM)
        training.wait(timeout=60)


@pytest.mark.parametrize("where", ["full", "unwritable"])
def test_without_room_for_a_ring_training_goes_on_and_the_user_is_told(
    node: Node, where: str
) -> None:
    """Once a process, with a way out, and the same losses."""
    bare = node.run(TWO, watched=False)
    if where == "full":
        limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, "
        limited += f"(1 << 20, 1 << 20)); runpy.run_path({TINY!r}, run_name='__main__')"
        command = [*LAUNCH, "2", "--no-python", PYTHON, "-c", limited]
        result = node.run(command)
    else:
        result = node.run(TWO, ZEROMON_RUN_DIR="/proc/nowhere/r")
    assert result.code == 0, result.output
    assert losses(result.output) == losses(bare.output)
    assert result.output.count("this process is not watched") == 2
    assert "ZEROMON_DIR" in result.output
    assert "Traceback" not in result.output


def test_two_runs_at_once_do_not_mix(node: Node) -> None:
    """Same node, same collector, each its own ranks."""
    environments = [node.environment(name, PAUSE="0.05") for name in ("a", "b")]
    both = [subprocess.Popen(TWO, env=e, cwd=ROOT) for e in environments]
    assert [p.wait(timeout=120) for p in both] == [0, 0]
    for name in ("a", "b"):
        picture = node.settle(name)
        assert picture is not None
        assert [(r.rank, r.steps) for r in picture.ranks] == [(0, 5), (1, 5)]


def start_run(node: Node, port: int, **extra: str) -> subprocess.Popen[str]:
    environment = clean_environment() | {
        "ZEROMON_DIR": str(node.root),
        "ZEROMON_STORE": str(node.folder / "store"),
        **extra,
    }
    command = [PYTHON, "-m", "zeromon", "run", "--name", "r", "--port", str(port), "--", *TWO]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip


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
    picture = wait_for(lambda: node.store.names() and node.store.load("r"))
    assert [r.rank for r in picture.ranks] == [0, 1]


def test_a_killed_collector_is_started_again_and_loses_nothing(node: Node) -> None:
    """An agent notices; the new one reads the rings from their beginning."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    training = start_run(node, port, STEPS="100", PAUSE="0.2")
    address = wait_for(lambda: collector_address(node.root))
    wait_for(lambda: any(run.steps >= 5 for run in runs_at(address)))
    pid = json.loads((node.root / "collector.json").read_text())["pid"]
    (node.root / "collector.json").write_text("{}")
    os.kill(pid, signal.SIGKILL)
    again = wait_for(lambda: collector_address(node.root))
    steps = wait_for(lambda: [run.steps for run in runs_at(again) if run.steps >= 10])
    assert steps[0] >= 10
    training.communicate(timeout=120)
    assert training.returncode == 0
    picture = wait_for(lambda: ended_record(node))
    assert [(r.rank, r.steps, r.dropped) for r in picture.ranks] == [(0, 100, 0), (1, 100, 0)]


def ended_record(node: Node):  # type: ignore[no-untyped-def]
    if not node.store.names():
        return None
    picture = node.store.load("r")
    return picture if picture.ended else None


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
    assert "died: rank 0" in done.stdout
    assert Path(node.folder / "store" / "runs" / "orphan" / "snapshot.json").exists()


def test_rings_that_nobody_follows_are_reported(node: Node) -> None:
    """No collector ever ran; the rings are all there is."""
    environment = node.environment("lonely", FAULT="kill", WHO="0")
    subprocess.run(TWO, env=environment, cwd=ROOT, capture_output=True, check=False, timeout=90)
    done = subprocess.run(
        [PYTHON, "-m", "zeromon", "report"],
        env=clean_environment()
        | {"ZEROMON_DIR": str(node.root), "ZEROMON_STORE": str(node.folder / "none")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "run lonely: died: rank 0" in done.stdout
