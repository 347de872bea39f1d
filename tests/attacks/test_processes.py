"""Attacks on the processes of zeromon: signals while it starts, death in an attach, another user."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attaching import Job
from support import ROOT, ZEROMON, Node, clean_environment

from zeromon.attach.loader import attach_ranks, detach_ranks

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="Linux on x86-64"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_a_signal_while_a_run_starts_ends_it_without_a_traceback(
    number: signal.Signals, node: Node
) -> None:
    """Before Python has a handler the signal itself ends the process."""
    environment = node.environment("r")
    started = []
    for seconds in (0.1, 0.4, 1.0):
        command = [sys.executable, "-m", "zeromon", "run", "--", "sleep", "60"]
        started.append((seconds, subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )))  # fmt: skip
    began = time.monotonic()
    for seconds, running in started:
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        running.send_signal(number)
        said, _ = running.communicate(timeout=60)
        if "KeyboardInterrupt" in said and f"{ROOT}/zeromon" not in said:
            continue  # the interpreter has a handler before it has read the first line of ours
        assert running.returncode in (128 + number, -number), said
        assert "Traceback" not in said or f"{ROOT}/zeromon" not in said  # the interpreter's own


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The one training that all these attacks go for."""
    made = Job("plain", tmp_path_factory.mktemp("attacked") / "job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROMON_COLLECTOR", "off")
        made.wait_until(20)
        yield made
    made.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_is_refused_with_a_way_out(job: Job, tmp_path: Path) -> None:
    """Where the kernel has Yama, it refuses the same; the real kernel decides here."""
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    environment = clean_environment() | {"ZEROMON_DIR": f"/dev/shm/{tmp_path.name}"}
    (rank,) = job.ranks()
    done = subprocess.run(
        [*nobody, *ZEROMON, "attach", str(rank.pid), "--no-view"],
        env=environment, cwd="/", capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done
    said = done.stderr.splitlines()
    assert f"process {rank.pid} belongs to root" in said[0] and len(said) == 2
    assert f"sudo -u root zeromon attach {rank.pid}" in said[1]
    step = job.step
    job.wait_until(step + 5)


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.long)])
def test_an_attach_that_is_killed_leaves_the_training_alone(job: Job, node: Node, kills: int) -> None:
    """SIGKILL at random moments; each time a later attach and detach work."""
    draw, ranks = random.Random(kills), job.ranks()
    began = time.monotonic()
    assert [one.refused for one in attach_ranks(ranks, node.root)[1]] == [""]
    whole_seconds = time.monotonic() - began
    assert [one.refused for one in detach_ranks(ranks, node.root)] == [""]
    for _ in range(kills):
        child = os.fork()
        if not child:
            try:
                attach_ranks(ranks, node.root)
            finally:
                os._exit(0)
        time.sleep(whole_seconds * draw.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert [one.refused for one in attach_ranks(ranks, node.root)[1]] == [""]
        assert [one.kept for one in detach_ranks(ranks, node.root)] == [()]
        step = job.step
        job.wait_until(step + 2)


def test_losses_and_torch_are_as_without_the_attacks(job: Job) -> None:
    """Runs last: the training ends, and takes all its steps again, alone."""
    (told,) = job.finish()
    assert told["losses"] == told["again"]
    assert (told["changed"], told["marked"]) == ([], 0)
