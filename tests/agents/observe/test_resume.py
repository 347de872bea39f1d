"""What the first step says of the steps before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zeromon.ring.buffer import NameKind, RingReader, RingWriter
from zeromon_agents.observe.step import Steps
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON, HookContext


def step_of(optimizer: torch.optim.Optimizer, steps: Steps | None = None) -> None:
    """A backward and a step, as the hooks see them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    if steps is not None:
        steps.optimizer_begins(optimizer)
    optimizer.step()
    if steps is not None:
        steps.optimizer_ends(optimizer)


@pytest.mark.parametrize(
    ("kind", "before", "known"),
    [(torch.optim.AdamW, 7, 7), (torch.optim.AdamW, 0, 0), (torch.optim.SGD, 7, None)],
)
def test_where_the_optimizer_resumed_is_written_once(
    tmp_path: Path, kind: Any, before: int, known: int | None
) -> None:
    """By its own count, that a checkpoint restores; plain SGD keeps none."""
    ring = RingWriter(tmp_path / "rank0.1.ring", rank=0, capacity=1024)
    context = HookContext(ring, Guard())
    context.mode = ON
    steps = Steps(context, lambda _: None, lambda: None)
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for _ in range(before):
        step_of(optimizer)
    for _ in range(3):
        step_of(optimizer, steps)
    names = [n.payload for n in RingReader(ring.path).names() if n.kind == NameKind.META]
    written = [payload["resumed_step"] for payload in names if "resumed_step" in payload]
    assert written == ([] if known is None else [known])
    assert not context.guard.errors
