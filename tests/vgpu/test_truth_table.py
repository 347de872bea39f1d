"""A dozen cells of the truth table: what zeromon says of CUDA runs is what their devices did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from vgpu.environment import Environment
from vgpu.truth_table import STRATEGIES, Virtual, misses, run_cell

pytestmark = [pytest.mark.vgpu, pytest.mark.short]

CELLS = {
    "DDP": "10",
    "DDP, `gradient_as_bucket_view`": "0",
    "DDP, `find_unused_parameters`": "10",
    "DDP, `static_graph`": "1",
    "DDP, `no_sync`, 2 micro-steps": "10",
    "HF Trainer, its defaults": "10",
    "FSDP1": "10",
    "FSDP2": "1",
    "ZeRO-1": "10",
    "ZeRO-2": "0",
    "ZeRO-3": "1",
    "tensor parallel": "10",
    "pipeline": "10",
}
"""Strategy -> in which steps it reads its loss; 0: never."""


@dataclass(frozen=True)
class FewerSamples(Virtual):
    """The virtual device, and a batch for values that a CPU computes."""

    def shape(self, bound: str) -> Sequence[str]:
        return (*super().shape(bound), "--batch", "64")


@pytest.mark.parametrize("title", CELLS)
def test_steps_phases_and_exposed_time_are_those_of_the_timeline(
    virtual_cuda: Environment, title: str
) -> None:
    """The step within 2 %, phases and exposed communication within a point of it."""
    (strategy,) = (one for one in STRATEGIES if one.title == title)
    place = (FewerSamples if strategy.arithmetic else Virtual)(virtual_cuda)
    cell = run_cell(place, strategy, "device", CELLS[title], 2)
    assert "ranks" in cell, cell["failed"]
    assert not list(misses(cell["ranks"])), cell["ranks"]
