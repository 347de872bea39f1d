"""What torch.compile has counted, as the agent reads it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from zeromon_agents.observe.process_metadata import Compiled


class Counting(nn.Module):
    """Breaks its graph at each call, and is specialized for the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = x * self.calls
        torch._dynamo.graph_break()
        return y + 1


def test_frames_breaks_and_recompilations_have_their_reasons() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    known = Compiled()
    assert known.news(1) is None
    model = torch.compile(Counting(), backend="eager")
    for _ in range(3):
        model(torch.ones(2))
    found = known.news(2)
    assert found is not None
    assert found["frames"] == torch._dynamo.utils.counters["frames"]["ok"] >= 3
    assert found["graph_breaks"] == sum(torch._dynamo.utils.counters["graph_break"].values()) >= 2
    assert "graph" in found["break_reasons"][0]
    if hasattr(torch._dynamo.utils.CompilationMetrics(), "recompile_reason"):
        assert found["recompiles"] >= 2
        assert any("calls ==" in reason for reason in found["recompile_reasons"])
    model(torch.ones(2, 2))
    assert known.news(2) is None, "soon after"
    assert known.news(3) is not None
    assert known.news(100) is None, "nothing new"


def test_a_process_that_compiles_nothing_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert Compiled().news(1) is None
