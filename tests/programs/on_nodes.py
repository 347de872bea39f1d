"""FSDP2 on gloo until FOLDER/stop is there: `on_nodes.py FOLDER`. FOLDER/slowR: so long rank R sleeps.

Each step sleeps 60 ms in forward on every rank, so that its length is known.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from leave import leave
from torch import nn
from torch.distributed.fsdp import fully_shard

FOLDER = Path(sys.argv[1])

dist.init_process_group("gloo")
RANK = dist.get_rank()
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
stop = torch.zeros(1)
while not stop.item():
    time.sleep(0.06)
    slow = FOLDER / f"slow{RANK}"
    if slow.exists():
        time.sleep(float(slow.read_text()))
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    stop = torch.tensor([float((FOLDER / "stop").exists())])
    dist.all_reduce(stop)
dist.destroy_process_group()
leave()
