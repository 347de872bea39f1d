"""Two ranks of DDP; rank 0 opens a run of each tracker that the command names, as scripts do."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = int(os.environ.get("STEPS", "40"))
PAUSE = float(os.environ.get("PAUSE", "0.05"))


def opened(names: list[str]) -> list[Any]:
    """A function ``log(loss, step)`` for each tracker."""
    logs: list[Any] = []
    if "wandb" in names:
        import wandb

        board = wandb.init(project="ours", name="mine", settings=wandb.Settings(silent=True))
        logs.append(lambda loss, step: board.log({"train/loss": loss}, step=step))
    if "mlflow" in names:
        import mlflow

        mlflow.start_run()
        logs.append(lambda loss, step: mlflow.log_metric("loss", loss, step=step))
    if "tensorboard" in names:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter("board")
        logs.append(lambda loss, step: writer.add_scalar("train/loss", loss, step))
    return logs


def main() -> None:
    """Trains."""
    names = sys.argv[1:] if os.environ.get("RANK") == "0" else []
    early = opened(names[::2])  # before zeromon's agent is there
    dist.init_process_group("gloo")
    logs = [*early, *opened(names[1::2])]
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        loss = model(torch.randn(8, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(PAUSE)
        for log in logs:
            log(loss.item(), step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
