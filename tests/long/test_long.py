"""The verdict names cause and rank of drawn faults, live and afterwards, and raises no false alarm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
TARGET = 0.97
pytestmark = pytest.mark.long


@pytest.mark.parametrize("words", [[], ["--healthy"]], ids=["faults", "false-alarms"])
def test_first_lines_name_cause_and_rank(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """An hour and a half, and a quarter: the table is on stdout, all lines are in result.json."""
    name = "drawn-healthy" if words else "drawn"
    folder = RUN.parents[2] / "build" / name
    with capfd.disabled():
        done = subprocess.run([sys.executable, str(RUN), *words, "--out", str(folder)], check=False)
    result = json.loads((folder / "result.json").read_text())
    assert done.returncode == 0
    low = {part: share for part, share in result["shares"].items() if share < (1 if words else TARGET)}
    assert low == {}
    assert not words or result["flips"] == 0
