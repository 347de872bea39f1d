"""`zeromon track`, and what `zeromon run --track` refuses before training starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import zeromon


@pytest.mark.parametrize(
    ("name", "said"),
    [("wandbb", "is no tracker"), ("kubeflow", "TrainJobRuntimeStatus"), ("mlflow", "zeromon[mlflow]")],
)  # fmt: skip
def test_what_cannot_be_tracked_is_refused_before_training(
    tmp_path: Path, name: str, said: str
) -> None:
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
        tmp_path, "track", "--to", "kubeflow",
        KUBEFLOW_TRAINER_SERVER_URL="http://127.0.0.1:1/x",
        KUBEFLOW_TRAINER_SERVER_TOKEN=str(tmp_path / "token"),
    )  # fmt: skip
    assert done.returncode == 2
    assert "no run is live on this node" in done.stderr
