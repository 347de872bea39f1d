"""A training script as users write it, without a word of zeromon's; --fault plants what goes wrong."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=("", "deadlock", "nan", "leak", "lengths"), default="")
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--steps", type=int, default=1000)
options = parser.parse_args()
width = options.width

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(
    *(
        nn.Sequential(
            nn.Linear(options.width, 4 * options.width),
            nn.GELU(),
            nn.Linear(4 * options.width, options.width),
        )
        for _ in range(4)
    )
).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
kept = []
for step in range(options.steps):
    # As a padded batch is as long as its longest sequence
    length = options.batch * (8 + step * 5 % 17) if options.fault == "lengths" else options.batch
    loss = model(torch.randn(length, width, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if options.fault == "leak":
        kept.append(torch.empty(120 << 20, dtype=torch.uint8, device="cuda"))
    if options.fault == "deadlock" and step == 2 and rank == 0:
        dist.barrier()
    if options.fault == "nan" and not torch.isfinite(loss):
        raise ValueError("the loss is not finite")
    place = rank, dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    print(*place, torch.cuda.max_memory_allocated(), flush=True)
dist.destroy_process_group()
