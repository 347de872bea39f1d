"""A case of the truth bench on the virtual device, end to end: what zeromon answers is the truth."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vgpu.environment import Environment

BENCH = Path(__file__).resolve().parents[1] / "bench" / "truth"
sys.path.insert(0, str(BENCH))

pytestmark = [pytest.mark.vgpu, pytest.mark.short]

RELATIVE = {"step": 0.02, "forward": 0.02, "backward": 0.02, "optimizer": 0.02, "exposed": 0.02,
            "peak": 0.0, "bytes": 0.01}  # fmt: skip
"""Question -> the largest error; that of exposed communication is a share of the step."""


def test_the_answers_about_poor_overlap_are_those_of_the_timeline(virtual_cuda: Environment) -> None:
    from monitor import load_monitor
    from watched import told

    result = told(load_monitor("zeromon").MONITOR, "virtual", "poor-ddp")
    assert "step" in result.truth, result.output
    errors = {name: result.truth[name].error(result.answers[name]) for name in RELATIVE}
    assert not [name for name, off in errors.items() if abs(off) > RELATIVE[name]], errors
    assert result.answers["cause"] == "communication", result.answers["sentence"]
