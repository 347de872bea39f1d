"""Two ranks, one collective a step, of which a known share is hidden.

Rank 1 comes LATE ms late to each all-reduce; rank 0 issues it asynchronously, computes for BUSY ms
(it sleeps: the calling thread is not blocked by communication), then waits. So on rank 0 the
collective lasts LATE, of which min(BUSY, LATE) is hidden, and the rest is exposed. The truth that is
printed is measured around the same calls without zeromon's help.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from leave import leave

LATE, BUSY, STEPS = float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 1e3, 24

dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
tensor = torch.ones(1024)
truth = []
for _ in range(STEPS):
    (weight * 1).backward()
    dist.barrier()
    if rank == 1:
        time.sleep(LATE)
    issued = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        time.sleep(BUSY)
    reached = time.monotonic()
    work.wait()
    truth.append((issued, reached, time.monotonic()))
    optimizer.step()
if rank == 0:
    path = os.environ["TRUTH"]
    with open(path, "w") as file:
        json.dump(truth, file)
dist.destroy_process_group()
leave()
