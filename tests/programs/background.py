"""FSDP2 that trains while a thread writes an asynchronous checkpoint, on rank 1 for SECONDS."""

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from leave import leave
from torch import nn
from torch.distributed.fsdp import fully_shard

FOLDER, SECONDS = sys.argv[1], float(sys.argv[2])


class SlowWriter(dcp.FileSystemWriter):
    """Rank 1 takes its time, and the thread of rank 0 waits for it in a collective."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(SECONDS * dist.get_rank())
        return super().write_data(*args, **kwargs)


dist.init_process_group("cpu:gloo")
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)


def step() -> None:
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(10):
    step()
apart = dist.new_group(group_desc="writers")  # threads of one group would call in any order
writer = SlowWriter(FOLDER)
writes = dcp.async_save({"model": model.state_dict()}, storage_writer=writer, process_group=apart)
until = time.monotonic() + SECONDS
while True:
    step()
    late = torch.tensor([float(time.monotonic() < until)])
    dist.all_reduce(late)
    if not late.item():
        break
writes.result()
for _ in range(5):
    step()
dist.barrier()
dist.destroy_process_group()
leave()
