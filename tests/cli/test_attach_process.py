"""What `zeromon attach PID` and `zeromon detach` say before anything is touched."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from zeromon.cli import main


@pytest.fixture(autouse=True)
def own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of this machine is seen, and no collector is started."""
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ZEROMON_COLLECTOR", "off")


@pytest.mark.parametrize("verb", ["attach", "detach"])
def test_a_pid_that_is_not_there(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "4194305"]) == 2
    assert "there is no process 4194305" in capsys.readouterr().err


@pytest.mark.parametrize("pid", [os.getpid(), os.getppid()], ids=["own", "parent"])
def test_our_own_processes_are_refused(pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attach", str(pid)]) == 2
    assert f"refusing to attach to process {pid}" in capsys.readouterr().err


def test_what_is_no_rank_leaves_no_run_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        assert main(["attach", str(other.pid), "--no-view"]) == 2
        said = capsys.readouterr().err
        assert f"process {other.pid} is not Python" in said
        assert [p.name for p in (tmp_path / "rings").iterdir()] == [".attach"]
    finally:
        other.kill()
        other.wait()


def test_nothing_to_leave(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detach"]) == 2
    assert "zeromon detach RUN, PID or --all" in capsys.readouterr().err
    assert main(["detach", "--all"]) == 2
    assert "no rank of this user is watched" in capsys.readouterr().err
