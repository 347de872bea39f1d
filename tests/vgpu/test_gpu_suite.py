"""The quick rows of the GPU suite on the virtual device."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from vgpu.environment import ROOT, Environment
from vgpu.machine import write_machine

pytestmark = pytest.mark.vgpu

QUICK_ROWS = ("4", "8", "9b", "10", "12", "13", "14")


def test_quick_rows_pass(virtual_cuda: Environment, tmp_path: Path) -> None:
    write_machine(tmp_path / "device")
    command = [virtual_cuda.python, ROOT / "tests/gpu/suite.py", "--out", tmp_path]
    done = subprocess.run(
        [*command, "--rows", ",".join(QUICK_ROWS), "--patience", "4"],
        env=os.environ | virtual_cuda.variables(tmp_path / "device"),
        capture_output=True,
        text=True,
    )
    rows = json.loads((tmp_path / "figures-all.json").read_text())["rows"]
    verdicts = {row["number"]: row["verdict"] for row in rows}
    unexplained = [row for row in rows if row["verdict"] == "n/a" and not row["note"]]
    assert set(verdicts) == set(QUICK_ROWS) and not unexplained
    assert set(verdicts.values()) <= {"pass", "n/a"}, done.stdout + done.stderr
