"""What the agent does in a step on a CUDA device may not grow: Python functions and records."""

from __future__ import annotations

import json

import pytest
from support import ROOT

from vgpu.conftest import CudaRunner

pytestmark = [pytest.mark.vgpu, pytest.mark.short]

MOST = {"ddp": (260, 20), "fsdp2": (700, 128), "zero3": (-330, 53)}
"""Strategy -> Python functions that the training thread enters for the agent in a step, and records.

Below zero: the agent tells an event the current stream, which torch looks for in 15 functions.
"""


@pytest.mark.parametrize("strategy", MOST)
def test_a_step_costs_no_more_calls_and_records(strategy: str, cuda_run: CudaRunner) -> None:
    done = cuda_run(
        ROOT / "tests/bench/count_program.py", strategy, "256", "4", "10",
        watched=True, PYTHONHASHSEED="0",
    )  # fmt: skip
    line = next(x for x in done.output.splitlines() if x.startswith("COUNTS "))
    found = json.loads(line.removeprefix("COUNTS "))
    calls, records = MOST[strategy]
    added = found["with"] - found["without"]
    assert not found["errors"]
    assert calls - 0.2 * abs(calls) <= added <= calls, found
    assert 0.85 * records <= found["records"] <= records, found
