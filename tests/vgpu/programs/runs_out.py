"""Trains by DDP until rank 1's device is full: ``leak`` keeps 24 MiB of each step, ``batch`` meets one
large batch at step 40.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 512
STEPS = 200


def main() -> None:
    leaks, rank = sys.argv[1] == "leak", int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).cuda()
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    for step in range(STEPS):
        rows = 1 << 20 if not leaks and rank and step == 40 else 64
        loss = model(torch.ones(rows, WIDTH, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if leaks and rank:
            kept.append(torch.empty(6 << 20, device="cuda"))
        time.sleep(0.1)


if __name__ == "__main__":
    main()
