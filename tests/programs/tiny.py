"""A few steps of DDP on a tiny model. What goes wrong, and when, is in the environment:

FAULT=import|before-init|mid-step|kill|exit|os-exit|spawn|sleep|patches
"""

import os
import signal
import sys
import time

FAULT = os.environ.get("FAULT", "")
if FAULT == "import":
    raise ImportError("injected at import")

import torch
import torch.distributed as dist
from torch import nn

if FAULT == "before-init":
    raise RuntimeError("injected before init_process_group")


def train(rank: int = -1, world: int = 1, port: str = "") -> None:
    if rank >= 0:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        dist.init_process_group("gloo", rank=rank, world_size=world)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
    me = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(400, 8)),
        batch_size=4,
        num_workers=int(os.environ.get("WORKERS", "0")),
        multiprocessing_context=os.environ.get("CONTEXT") or None,
    )
    steps = int(os.environ.get("STEPS", "5"))
    for step, (batch,) in zip(range(1, steps + 1), loader, strict=False):
        loss = model(batch).sum()
        if step == 3 and me == int(os.environ.get("WHO", "0")):
            fail()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(float(os.environ.get("PAUSE", "0")))
    print(f"rank {me} loss {loss.item():.6f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def fail() -> None:
    if FAULT == "mid-step":
        raise RuntimeError("injected in a step")
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "exit":
        sys.exit(7)
    if FAULT == "os-exit":
        os._exit(9)
    if FAULT == "sleep":
        time.sleep(600)


if __name__ == "__main__":
    if FAULT == "spawn":
        import torch.multiprocessing as mp

        mp.spawn(train, (2, os.environ["PORT"]), nprocs=2)
    else:
        train()
