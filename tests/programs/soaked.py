"""Trains a tiny model by steps that mostly sleep: `soaked.py OUT ATTEMPT`.

OUT gets the number of steps that each rank has ended, in a file for each attempt and rank. OUT/again and
OUT/stop hold the last step of an attempt: it ends with an error, or for good.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

OUT, PAUSE = Path(sys.argv[1]), float(os.environ.get("PAUSE", "0.25"))


def last_step(name: str) -> int:
    """The step in file *name* of OUT; -1 without one."""
    try:
        return int((OUT / name).read_text())
    except (OSError, ValueError):
        return -1


def main() -> int:
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), sys.argv[2]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    count = os.open(OUT / f"steps.{attempt}.{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    step, code = 0, -1
    while code < 0:
        model(torch.ones(4, 64)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        os.pwrite(count, b"%012d" % step, 0)
        if attempt == "0" and step == last_step("again"):
            code = 7
        elif step == last_step("stop"):
            code = 0
        time.sleep(PAUSE)
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
