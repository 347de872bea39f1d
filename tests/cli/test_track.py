"""`zeromon attach --track`, and what `zeromon run --track` refuses before training starts."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import zeromon
from support import ZEROMON, clean_environment, ended, free_port, wait_for


@pytest.mark.parametrize(
    ("name", "said"),
    [("wandbb", "is no tracker"), ("kubeflow", "TrainJobRuntimeStatus"), ("mlflow", "zeromon[mlflow]")],
)  # fmt: skip
def test_what_cannot_be_tracked_is_refused_before_training(tmp_path: Path, name: str, said: str) -> None:
    program = f"open({str(tmp_path / 'trained')!r}, 'w')"
    hidden = "import sys; sys.modules['mlflow'] = None"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    words = ("run", "--track", name, "--", sys.executable, "-c", program)
    done = zeromon(tmp_path, *words, PYTHONPATH=f"{tmp_path}:{':'.join(sys.path[1:])}")
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "trained").exists()


def test_a_run_that_is_not_live_is_not_tracked(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    done = zeromon(
        tmp_path, "attach", "--track", "kubeflow",
        KUBEFLOW_TRAINER_SERVER_URL="http://127.0.0.1:1/x",
        KUBEFLOW_TRAINER_SERVER_TOKEN=str(tmp_path / "token"),
    )  # fmt: skip
    assert done.returncode == 2
    assert "no run is live on this node" in done.stderr


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_a_second_process_does_not_send_the_same_run_to_the_same_tracker(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    extra = {
        "KUBEFLOW_TRAINER_SERVER_URL": "http://127.0.0.1:1/x",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }
    homes = {"ZEROMON_DIR": str(tmp_path / "rings"), "ZEROMON_STORE": str(tmp_path / "store")}
    words = ["run", "--name", "r", "--quiet", "--port", str(free_port()), "--track", "kubeflow", "--"]
    training = subprocess.Popen(
        [*ZEROMON, *words, sys.executable, "-c", "input()"],
        env=clean_environment() | homes | extra,
        stdin=subprocess.PIPE,
    )
    lock = tmp_path / "rings" / "r" / ".track-kubeflow.lock"
    try:
        wait_for(lambda: is_locked(lock))
        second = zeromon(tmp_path, "attach", "r", "--track", "kubeflow", **extra)
        assert second.returncode == 2
        assert "another process sends run r to kubeflow already" in second.stderr
        assert "twice" in second.stderr
    finally:
        training.communicate(b"\n")
    wait_for(lambda: not lock.exists() or not is_locked(lock))
    assert ended(training, 10)
