"""What `zeromon run` adds to the environment changes nothing that a script sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import zeromon_here

from zeromon.cli.run import child_environment
from zeromon.ring import paths

ASK = "import json, sys; print(json.dumps(sys.path))"


def sys_path(environment: dict[str, str], folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, cwd=folder, capture_output=True, check=True
    )
    return [str(entry) for entry in json.loads(done.stdout)]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("given", [None, "", ":/opt/x", "/opt/x:", "/opt/x::/opt/y", ":", "lib"])
def test_sys_path_is_that_of_the_command_alone(tmp_path: Path, given: str | None, nested: bool) -> None:
    """``:/opt/x``, as ``export PYTHONPATH=$PYTHONPATH:/opt/x`` gives, has the working directory, too."""
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and k[:7] != "ZEROMON"}
    if given is not None:
        bare["PYTHONPATH"] = given
    child = child_environment(bare, tmp_path)  # type: ignore[arg-type]
    if nested:
        child = child_environment(child, tmp_path)  # type: ignore[arg-type]
    assert child["PYTHONPATH"].split(os.pathsep).count(str(paths.SHIM)) == 1
    assert sys_path(child, tmp_path) == sys_path(bare, tmp_path)


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [("no-such-command", 127, "No such file or directory"), ("/etc/passwd", 126, "Permission denied")],
)
def test_a_command_that_cannot_run_leaves_no_run(
    tmp_path: Path, command: str, code: int, reason: str
) -> None:
    """Refused before a collector could see a run, with the exit code of a shell."""
    done = zeromon_here(tmp_path, "run", "--", command)
    assert (done.returncode, done.stderr) == (code, f"zeromon: cannot run {command}: {reason}\n")
    assert not [path for path in tmp_path.rglob("*") if path.name == "run.json"]
    assert not list(tmp_path.glob("rings/*/"))


def test_a_run_says_the_name_that_its_record_will_have(tmp_path: Path) -> None:
    """The record of an earlier run keeps the name that was asked for."""
    earlier = tmp_path / "store" / "runs" / "exp"
    earlier.mkdir(parents=True)
    (earlier / "snapshot.json").write_text("{}")
    environment = os.environ | {
        "ZEROMON_DIR": str(tmp_path),
        "ZEROMON_STORE": str(tmp_path / "store"),
        "ZEROMON_COLLECTOR": "off",
    }
    command = [sys.executable, "-m", "zeromon", "run", "--name", "exp", "--", "true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "watching run exp-2 " in done.stderr
    assert [path.parent.name for path in tmp_path.glob("*/run.json")] == ["exp-2"]
