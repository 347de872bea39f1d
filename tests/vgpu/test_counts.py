"""What the agent does in a step on a CUDA device may not grow: Python functions and records."""

from __future__ import annotations

import sys

import pytest
from support import ROOT

from vgpu.environment import Environment

sys.path.insert(0, str(ROOT / "tests/bench"))
import bench_counts

pytestmark = [pytest.mark.vgpu, pytest.mark.short]

MOST = {"ddp": (260, 20), "fsdp2": (640, 140), "zero3": (-640, 31)}
"""Strategy -> Python functions that the training thread enters for the agent in a step, and records.

Below zero: the agent passes the current stream to an event; torch looks it up in 15 functions.
"""


@pytest.mark.parametrize("strategy", MOST)
def test_a_step_costs_no_more_calls_and_records(strategy: str, virtual_cuda: Environment) -> None:
    found = bench_counts.count_calls(strategy, virtual_cuda)
    calls, records = MOST[strategy]
    assert calls - 0.2 * abs(calls) <= found["calls"] <= calls, found
    # How often the compute stream stands still, with a record each, is a matter of the host's pace
    assert 0.75 * records <= found["records"] <= records, found
