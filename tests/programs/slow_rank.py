"""FSDP2 or DDP on gloo with one rank slowed: `slow_rank.py WHERE SHARE [STEPS] [ddp]`.

WHERE is data, forward, random or none; rank 1 sleeps that SHARE of a usual step there, from step 10 on
(random: in one step of two, twice as long). A step sleeps 40 ms in forward on every rank, so that its
length is known. With cpu it computes as long, each rank on a CPU of its own, and rank 1's gets company.
"""

import os
import random
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from leave import leave
from torch import nn
from torch.distributed.fsdp import fully_shard

WHERE, SHARE = sys.argv[1], float(sys.argv[2])
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 60
DDP = sys.argv[4:] == ["ddp"]
USUAL_S = 0.04


class Batches(torch.utils.data.Dataset):
    """One batch a step; the slow rank is late with it."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if WHERE == "data" and SLOW and index >= 10:
            time.sleep(SHARE * USUAL_S)
        return torch.ones(64)


def spend(seconds: float) -> None:
    """Sleeps, or uses so much of a CPU."""
    if WHERE != "cpu":
        time.sleep(seconds)
        return
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


company: list[subprocess.Popen[bytes]] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        spend(USUAL_S)
        if SLOW and self.steps >= 10:
            if WHERE == "forward":
                time.sleep(SHARE * USUAL_S)
            elif WHERE == "random" and random.random() < 0.5:
                time.sleep(2 * SHARE * USUAL_S)
            elif WHERE == "cpu" and not company:
                company.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        for layer in self.layers:
            x = layer(x)
        return x


dist.init_process_group("gloo")
SLOW = dist.get_rank() == 1 and WHERE != "none"
if WHERE == "cpu":
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[dist.get_rank() % len(cpus)]})
model: nn.Module = Net()
if DDP:
    model = nn.parallel.DistributedDataParallel(model)
else:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
for batch in torch.utils.data.DataLoader(Batches(), batch_size=1):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
for other in company:
    other.kill()
dist.destroy_process_group()
leave()
