"""What the agent does in a step may not grow: counts that do not depend on the machine's load."""

from __future__ import annotations

import sys

import pytest
from support import ROOT

from zeromon_agents.runtime.hook_context import compiled_hooks

sys.path.insert(0, str(ROOT / "tests/bench"))
import bench_counts

MOST = {"ddp": (140, 11), "fsdp2": (275, 104), "zero3": (215, 18)}
"""Strategy -> Python functions that the training thread enters for the agent in a step, and records."""


@pytest.mark.parametrize("strategy", MOST)
def test_a_step_costs_no_more_calls_and_records(strategy: str) -> None:
    assert compiled_hooks is not None
    found = bench_counts.count_calls(strategy)
    calls, records = MOST[strategy]
    # A lower limit, too: a hook that no longer runs would cost nothing
    assert 0.8 * calls <= found["calls"] <= calls, found
    assert 0.9 * records <= found["records"] <= records, found
