"""A data-parallel job with one known fault, which it measures itself: `job.py CASE STEPS`, rank of two.

Every tool watches this script. What is true of it is known by construction, or by the marks that the
script takes around its own calls; each rank writes them into RANK.json of the folder TRUTH. Where a
tool asks for lines in the script, they are in its file in monitors/.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from monitor import monitor_lines
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CASE, STEPS = sys.argv[1], int(sys.argv[2])
FOLDER = Path(os.environ["TRUTH"])
WIDTH, LAYERS, BATCH = 512, 8, 256
DELAY, FAULTY, AT_STEP, KEPT = 0.050, 1, 30, 1 << 22
now = time.perf_counter
lines = monitor_lines()
marks: list[dict[str, float]] = []
kept: list[torch.Tensor] = []


class Samples(Dataset):
    """Random rows; in the case "input" the faulty rank waits for each batch."""

    def __len__(self) -> int:
        return dist.get_world_size() * STEPS * BATCH

    def __getitem__(self, at: int) -> torch.Tensor:
        if CASE == "input" and RANK == FAULTY and at // 2 % BATCH == 0:
            time.sleep(DELAY)
        return torch.full((WIDTH,), float(at % 7))


class Net(nn.Module):
    """An MLP; in the case "slow" the faulty rank's forward takes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if CASE == "slow" and RANK == FAULTY:
            time.sleep(DELAY)
        return self.layers(batch)


def stand_still() -> None:
    """The faulty rank goes no further."""
    time.sleep(3600)


def keep() -> None:
    """Memory that no step gives back: 4 bytes each of KEPT elements."""
    kept.append(torch.ones(KEPT))


def exchange(model: nn.Module) -> None:
    """In the case "exchange" gradients are summed by one blocking call for each parameter."""
    for parameter in model.parameters():
        lines.communicator().all_reduce(parameter.grad)


def fault(step: int) -> None:
    if step == AT_STEP and RANK == FAULTY and CASE in ("hang", "death"):
        (FOLDER / "struck").write_text(str(time.time()))
        if CASE == "hang":
            stand_still()
        os.kill(os.getpid(), 9)
    if CASE == "leak":
        keep()


def train(model: nn.Module, batches: DataLoader) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    source = iter(batches)
    for step in range(1, STEPS + 1):
        with lines.each_step(model):
            began = now()
            fault(step)
            batch = next(source)
            loaded = now()
            loss = model(batch).square().mean()
            forwarded = now()
            loss.backward()
            backwarded = now()
            if CASE == "exchange":
                exchange(model)
            exchanged = now()
            optimizer.step()
            ended = now()
            optimizer.zero_grad()
        marks.append({
            "data": loaded - began, "forward": forwarded - loaded, "backward": backwarded - forwarded,
            "exchange": exchanged - backwarded, "optimizer": ended - exchanged, "end": ended,
        })  # fmt: skip


dist.init_process_group("gloo")
RANK = dist.get_rank()
torch.manual_seed(0)
(FOLDER / f"{RANK}.pid").write_text(str(os.getpid()))
lines.begin()
net = Net()
started = time.time()
loader = DataLoader(Samples(), BATCH, sampler=DistributedSampler(Samples(), shuffle=False))
train(net if CASE == "exchange" else nn.parallel.DistributedDataParallel(net), loader)
lines.end()
sizes = [p.numel() * 4 for p in net.parameters()]
facts = {"marks": marks, "parameters": sum(sizes), "calls": len(sizes), "started": started}
unfinished = FOLDER / f"{RANK}.part"
unfinished.write_text(json.dumps(facts))
unfinished.rename(FOLDER / f"{RANK}.json")
limit = now() + float(os.environ.get("TRUTH_WAITS", "0"))
while now() < limit and not (FOLDER / "seen").exists():
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
