"""Trains on gloo and counts itself: `counted.py late|ddp|fsdp2 STEPS`, a rank of two.

Each rank writes RANK.json into the folder TRUTH: the marks that it took around its own calls
(CLOCK_MONOTONIC), its resident set by psutil, and the name of the trace that torch.profiler made of the
last steps. Then it waits until the folder has a file `seen`, so that what a monitor shows of the run can
be read while the ranks live.
"""

import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, TensorDataset

KIND, STEPS = sys.argv[1], int(sys.argv[2])
FOLDER = Path(os.environ["TRUTH"])
TRACED, WIDTH, LAYERS, BATCH = 22, 384, 4, 48
LATE, BUSY = 0.060, 0.020
LONGEST_WAIT = 30.0
now = time.monotonic_ns

dist.init_process_group("gloo")
RANK = dist.get_rank()
torch.manual_seed(0)
ends: list[int] = []
waits: list[list[tuple[int, int, int]]] = []
"""Step -> (issued, reached, left) of each collective."""


def late_steps() -> None:
    """Rank 1 issues each all-reduce LATE; rank 0 computes for BUSY, then waits."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    tensor = torch.ones(1024)
    for _ in range(STEPS):
        (weight * 1).backward()
        issued = now()
        dist.barrier()
        of_step = [(issued, issued, now())]
        if RANK == 1:
            time.sleep(LATE)
        issued = now()
        work = dist.all_reduce(tensor, async_op=True)
        if RANK == 0:
            time.sleep(BUSY)
        reached = now()
        work.wait()
        of_step.append((issued, reached, now()))
        optimizer.step()
        ends.append(now())
        waits.append(of_step)


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def sharded() -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    if KIND == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4)
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    return fully_shard(model)


@contextmanager
def marked(name: str, step: int):
    with record_function(f"truth:{name}:{step}"):
        yield


def trained_steps() -> str:
    """Steps of a small model; torch.profiler records the last ones. Returns the name of the trace."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = DataLoader(TensorDataset(torch.randn(STEPS * BATCH, WIDTH)), batch_size=BATCH)
    profiler = profile(activities=[ProfilerActivity.CPU])
    batches = iter(data)
    for step in range(1, STEPS + 1):
        if step == STEPS - TRACED + 1:
            profiler.start()
        with marked("data", step):
            (batch,) = next(batches)
        with marked("forward", step):
            loss = model(batch).square().mean()
        with marked("backward", step):
            loss.backward()
        with marked("optimizer", step):
            optimizer.step()
            ends.append(now())
            optimizer.zero_grad()
    profiler.stop()
    name = f"trace{RANK}.json"
    profiler.export_chrome_trace(str(FOLDER / name))
    return name


trace = late_steps() if KIND == "late" else trained_steps()
time.sleep(2)
facts = {
    "ends": ends, "waits": waits, "trace": trace,
    "rss": psutil.Process().memory_info().rss, "used": psutil.virtual_memory().percent / 100,
}  # fmt: skip
unfinished = FOLDER / f"{RANK}.part"
unfinished.write_text(json.dumps(facts))
unfinished.rename(FOLDER / f"{RANK}.json")
deadline = time.monotonic() + LONGEST_WAIT
while not (FOLDER / "seen").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
