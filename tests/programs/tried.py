"""Trains the same twice, the second time while a change is tried: `tried.py BEFORE STEPS`.

Before the trial it trains BEFORE steps, and STEPS with it; the losses of the steps of both are compared.

Some evaluations lie between backward and the optimizer: what they leave gathered must not become stale.
The test writes the request; the program waits until its rank has read it.
"""

import sys
import time

import torch
import torch.distributed as dist
from leave import leave
from torch import nn
from torch.distributed.fsdp import fully_shard

from zeromon_agents.runtime.bootstrap import BOOTSTRAP

BEFORE, STEPS, WIDTH = int(sys.argv[1]), int(sys.argv[2]), 16


def losses(steps: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    sharded = fully_shard(model)
    optimizer = torch.optim.Adam(sharded.parameters(), 1e-3)
    told = []
    for step in range(steps):
        batch = torch.randn(8, WIDTH)
        loss = (sharded(batch) - batch).square().mean()
        loss.backward()
        if step % 3 == 0:
            with torch.no_grad():
                sharded(batch)
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item().hex())
    return told


dist.init_process_group("gloo")
before = losses(BEFORE)
trials = BOOTSTRAP.agent.trials  # type: ignore[union-attr]
print("ready", flush=True)
while not trials.is_open:
    time.sleep(0.05)
dist.barrier()
after = losses(STEPS)
differs = next((n for n in range(BEFORE) if before[n] != after[n]), None)
print(f"losses: first difference {differs}; open {trials.is_open}", flush=True)
dist.destroy_process_group()
leave()
