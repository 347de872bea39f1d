"""Two ranks under DDP, FSDP2 and FSDP2 + TP with packed, padded and accumulated batches.

`received.py FOLDER`: each strategy has an agent of its own, whose ring lies in FOLDER/STRATEGY. The
program counts its samples and tokens itself, without the agent, into FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from leave import leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import zeromon_agents

STEPS = 6


class Model(nn.Module):
    """A table, an MLP, a head; a mask leaves padding out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(16, 8), nn.Linear(8, 32)
        self.down, self.head = nn.Linear(32, 8), nn.Linear(8, 16)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        lost = self.head(self.down(self.up(self.table(input_ids)))).pow(2).mean(-1)
        return lost.mean() if attention_mask is None else (lost * attention_mask).mean()


def ddp() -> nn.Module:
    return DistributedDataParallel(Model())


def fsdp2() -> nn.Module:
    return fully_shard(Model())


def fsdp2_tp() -> nn.Module:
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return fully_shard(parallelize_module(Model(), grid["tp"], plan), mesh=grid["dp_shard"])


def batches(step: int, own: int) -> list[dict[str, Any]]:
    """The micro-batches of a step: packed to one length, padded, or two of different lengths."""
    if step % 3 == 0:
        return [{"input_ids": torch.ones(1, 24, dtype=torch.long)}]
    if step % 3 == 1:
        mask = torch.arange(10) < torch.tensor([[4 + own], [10], [7]])
        return [{"input_ids": torch.ones(3, 10, dtype=torch.long), "attention_mask": mask.long()}]
    return [{"input_ids": torch.ones(2, n + own, dtype=torch.long)} for n in (5, 9)]


def train(make: Callable[[], nn.Module], own: int) -> dict[str, int]:
    model, counted = make(), Counter[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(STEPS):
        for batch in batches(step, own):
            model(**batch).backward()
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            counted["samples"] += len(ids)
            counted["tokens"] += ids.numel() if mask is None else int(mask.sum())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.ones(5, 50, dtype=torch.long))
        model.train()
    return dict(counted)


def main() -> None:
    dist.init_process_group("gloo")
    rank, folder, found = dist.get_rank(), Path(sys.argv[1]), {}
    for make in (ddp, fsdp2, fsdp2_tp):
        place = folder / make.__name__
        place.mkdir(mode=0o700, exist_ok=True)
        os.environ["ZEROMON_RUN_DIR"] = str(place)
        zeromon_agents.start()
        # both ranks of tensor parallelism work on the same batches
        found[make.__name__] = train(make, 0 if make is fsdp2_tp else rank)
        zeromon_agents.stop()
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
