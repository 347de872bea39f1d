"""Trains with every schedule of torch.distributed.pipelining, one after the other, in stages that sleep.

Sleeping takes time and no CPU, so the ranks compute at once however few cores there are. Each schedule
trains on a process group of its own. Prints nothing; `--out` gets the exact loss of each call.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from leave import leave
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules


class Sleep(torch.autograd.Function):
    """Sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()  # torch detaches outputs in place

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_seconds)
        return grad, None, None


class Stage(nn.Module):
    def __init__(self, forward_seconds, backward_seconds):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seconds = forward_seconds, backward_seconds

    def forward(self, x):
        return Sleep.apply(torch.tanh(self.linear(x)), *self.seconds)


def stage_ranks(name: str, ranks: int) -> list[int]:
    """The rank of each stage."""
    if name in ("GPipe", "1F1B"):
        return list(range(ranks))
    forth = list(range(ranks))
    return forth + (forth[::-1] if name == "ZBVZeroBubble" else forth)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("schedules", nargs="+")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--calls", type=int, default=1, help="calls of the schedule in a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--forward", type=float, default=0.005)
    parser.add_argument("--backward", type=float, default=0.010)
    parser.add_argument("--slow", type=float, default=1.0, help="factor of the last stage")
    parser.add_argument("--out")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    losses = {name: train(name, options) for name in options.schedules}
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(losses))
    time.sleep(float(os.environ.get("LINGER", "0")))
    dist.destroy_process_group()


def train(name: str, options: argparse.Namespace) -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    placed = stage_ranks(name, ranks)
    share = ranks / len(placed)
    torch.manual_seed(7)
    stages = []
    for number, owner in enumerate(placed):
        factor = share * (options.slow if number == len(placed) - 1 else 1.0)
        module = Stage(factor * options.forward, factor * options.backward)
        if owner == rank:
            stages.append(PipelineStage(module, number, len(placed), torch.device("cpu")))
    make = schedules.get_schedule_class(name)
    single = issubclass(make, schedules.PipelineScheduleSingle)
    loss = nn.functional.mse_loss
    schedule = make(stages[0] if single else stages, options.micro_batches, loss_fn=loss)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = torch.optim.SGD(params, 0.1)
    batch = torch.randn(4 * options.micro_batches, 8)
    kept = []
    for _ in range(options.steps):
        for _ in range(options.calls):
            found: list[torch.Tensor] = []
            inputs = (batch,) if rank == placed[0] else ()
            targets = {"target": batch, "losses": found} if rank == placed[-1] else {}
            schedule.step(*inputs, **targets)
            kept += [one.item().hex() for one in found]
        optimizer.step()
        optimizer.zero_grad()
    return kept


if __name__ == "__main__":
    main()
    leave()
