"""What only a GPU can show: `python -m pytest -m gpu tests/gpu`. Needs one CUDA device and NCCL."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from support import ROOT, Node, Result

pytestmark = pytest.mark.gpu

PROGRAM = str(ROOT / "tests" / "gpu" / "cases.py")


def case(node: Node, name: str) -> tuple[dict[str, Any], Result]:
    """Runs one case of cases.py; its JSON, and what the collector saw."""
    result = node.run([sys.executable, PROGRAM, name], ZEROMON_SHIM="0")
    assert result.code == 0, result.output
    line = next(x for x in result.output.splitlines() if x.startswith("{"))
    return json.loads(line), result


def test_exposed_time_is_that_of_the_compute_stream(node: Node) -> None:
    """A known kernel in front of an all-reduce; half of it hidden: within 5 % of CUDA's own events."""
    truth, result = case(node, "exposed")
    row = next(c for c in result.snapshot.ranks[0].collectives if c.op == "all_reduce")
    assert row.exposed_seconds == pytest.approx(truth["exposed_seconds"], rel=0.05)


def test_the_allocators_figures_are_torchs(node: Node) -> None:
    """Allocated, reserved and capacity at the end of the last step."""
    truth, result = case(node, "memory")
    memory = result.snapshot.ranks[0].memory
    assert memory is not None
    assert memory.allocated_bytes == truth["allocated"]
    assert memory.reserved_bytes == truth["reserved"]
    assert memory.capacity_bytes == truth["capacity"]


def test_an_out_of_memory_is_observed(node: Node) -> None:
    """With the size that was asked for."""
    truth, result = case(node, "out_of_memory")
    memory = result.snapshot.ranks[0].memory
    assert memory is not None
    assert memory.ooms == truth["ooms"] == 1


def test_the_agent_never_synchronizes(node: Node) -> None:
    """torch's sync debug mode raises at any synchronizing call of a hook."""
    truth, result = case(node, "no_sync")
    assert truth["errors"] == 0
    assert result.snapshot.ranks[0].errors == 0


def test_a_graph_is_captured_as_without_the_agent(node: Node) -> None:
    """Capture succeeds and replays give the right numbers."""
    truth, _ = case(node, "graph")
    assert truth["value"] == truth["expected"]


def test_nvml_finds_the_ranks_device(node: Node) -> None:
    """By UUID; memory and utilization are there."""
    _, result = case(node, "memory")
    device = result.snapshot.ranks[0].device_stats
    assert device is not None
    assert device.total_bytes
    assert device.used_bytes is not None
