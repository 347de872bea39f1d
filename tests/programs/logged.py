"""A loop of one's own on two ranks that logs, and makes the mistakes that such loops make.

The ranks average their gradients and begin with different parameters, read the same samples, and log by
stand-ins of tensorboardX and W&B. Step 40 has a large gradient; in step 50 rank 1 alone has a NaN.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).with_name("loggers")))
from tensorboardX.writer import SummaryWriter
from wandb.sdk.wandb_run import Run

STEPS, SPIKE, BROKEN = 52, 40, 50


def main() -> None:
    """Trains, and logs after each step: rank 0 the loss, all ranks another metric."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(256, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    data = torch.utils.data.TensorDataset(torch.randn(STEPS, 256, generator=_seeded()))
    loader = torch.utils.data.DataLoader(data, 1, shuffle=True, generator=_seeded())
    writer, run = SummaryWriter(), Run()
    for step, (batch,) in enumerate(loader, 1):
        loss = model(batch).square().mean() * (1e4 if step == SPIKE else 1.0)
        if step == BROKEN and rank == 1:
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
            param.grad /= dist.get_world_size()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        if rank == 0:
            writer.add_scalar("Loss/train", 2.0 / step, step)
            writer.add_scalar("Loss/val", 99.0, step)
        run.log({"train/loss": 77.0, "gpu_temperature": 3})
    dist.barrier()
    dist.destroy_process_group()


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


if __name__ == "__main__":
    main()
