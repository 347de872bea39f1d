"""Trains with a compiled step of the optimizer: `compiled_optimizer.py ddp|fsdp2 STEPS MICRO_STEPS`."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    strategy, steps, micro_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1))
    trained = nn.parallel.DistributedDataParallel(model) if strategy == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
    update = torch.compile(optimizer.step, backend="eager")
    samples = TensorDataset(torch.ones(steps * micro_steps, 32))
    for number, (batch,) in enumerate(DataLoader(samples)):
        trained(batch).mean().backward()
        if number % micro_steps == micro_steps - 1:
            update()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
