"""Trains with every source of randomness, and prints what came of it: `identical.py [spawn|forkserver]`.

A line a rank: the losses and the states of all random generators, exactly. PAUSE: seconds a step. CODE:
how it ends. AT_0_3: a shell command that rank 0 runs before its third step; so for any rank and step.
"""

import hashlib
import multiprocessing
import os
import random
import subprocess
import sys
import time

import numpy
import torch
import torch.distributed as dist
from launch import free_port
from torch import nn

STEPS = 8


def states() -> str:
    """What the next random numbers depend on."""
    found = (random.getstate(), numpy.random.get_state(), torch.get_rng_state().tolist())
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def train(rank: int = -1, world: int = 1, port: int = 0) -> None:
    if rank >= 0:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7 + rank)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(torch.randn(4 * STEPS, 8))
    losses = []
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    for step, (batch,) in enumerate(loader, 1):
        command = os.environ.get(f"AT_{rank}_{step}")
        if command:
            subprocess.run(command, shell=True, check=False, capture_output=True)
        noise = random.random() + numpy.random.random()
        loss = (model(batch) * noise).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        time.sleep(float(os.environ.get("PAUSE", "0")))
    sys.stdout.write(f"rank {rank} rng {states()} losses {' '.join(losses)}\n")  # in one piece
    sys.stdout.flush()
    dist.destroy_process_group()
    sys.exit(int(os.environ.get("CODE", "0")))


def main() -> None:
    if len(sys.argv) < 2:
        train()
        return
    context = multiprocessing.get_context(sys.argv[1])
    port = free_port()
    ranks = [context.Process(target=train, args=(rank, 2, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
