"""Trains three steps and ends while the agent's thread is inside torch, where it gives way to Python."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeromon_agents.runtime.agent import Agent

_BIG = torch.ones(1500, 1500)


def _beat(agent: Agent, beats: int) -> None:
    while not agent._stopping.is_set():
        torch.mm(_BIG, _BIG)


Agent._one_heartbeat = _beat  # type: ignore[method-assign]
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
