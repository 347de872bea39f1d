"""Rank 1 sleeps before its fourth all-reduce of 64 bytes; rank 0 waits for it."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for step in range(1, 10):
    (weight * 1).backward()
    if step == 4 and dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(16))
    optimizer.step()
