"""One rank of four, in one process on torch's fake process group: each parallelism with its own agent.

`parallel.py FOLDER` prints one JSON object: case -> strategy, dimensions, data-parallel ranks, sizes.
"""

import gc
import json
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeromon_agents
from zeromon.collector.rank import RankFollower
from zeromon.fold.summarize import summarize_rank
from zeromon_agents.runtime.bootstrap import BOOTSTRAP

RANKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def mesh(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def split(over: DeviceMesh) -> nn.Module:
    return parallelize_module(Block(), over, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def sharded(over: DeviceMesh | None, model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=over) if over is not None else fully_shard(model)


def fsdp2_tp() -> nn.Module:
    grid = mesh(2, 2, names=("dp_shard", "tp"))
    return sharded(grid["dp_shard"], split(grid["tp"]))


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(Block(), use_orig_params=True, device_id=torch.device("cpu"))


def stage() -> nn.Module:
    model = Block()
    made = PipelineStage(model, 0, RANKS, torch.device("cpu"))
    model.stage_of = lambda: made  # keeps it
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "tp": lambda: split(mesh(RANKS, names=("tp",))),
    "tp without names": lambda: split(mesh(RANKS)),
    "fsdp2 + tp": fsdp2_tp,
    "hsdp": lambda: sharded(mesh(2, 2, names=("replicate", "shard")), Block()),
    "hsdp of other names": lambda: sharded(mesh(2, 2, names=("outer", "inner")), Block()),
    "fsdp2": lambda: sharded(None, Block()),
    "compiled fsdp2": lambda: compiled(sharded(None, Block())),
    "ddp": lambda: DistributedDataParallel(Block()),
    "compiled ddp": lambda: compiled(DistributedDataParallel(Block())),
    "ddp of a compiled module": lambda: DistributedDataParallel(compiled(Block())),
    "compiled fsdp1": lambda: compiled(fsdp1()),
    "pp": stage,
    "none": Block,
}


if not hasattr(torch.cpu.Stream, "record_event"):  # before torch 2.7 FSDP2 does not run on a CPU
    CASES = {case: make for case, make in CASES.items() if "fsdp2" not in case and "hsdp" not in case}


def train(make: Callable[[], nn.Module]) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    is_ddp = isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)
    alone = model.no_sync if is_ddp else nullcontext  # DDP's reducer takes no Work of a fake group
    for _ in range(3):
        with alone():
            model(torch.ones(2, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def seen(folder: Path) -> dict[str, Any]:
    follower = RankFollower(next(folder.glob("*.ring")))
    follower.poll()
    snapshot = summarize_rank(follower.state)
    return {
        "strategy": snapshot.strategy,
        "dimensions": {d.name: d.size for d in snapshot.dimensions if d.used},
        "batches": snapshot.data_parallel_ranks,
        "steps": snapshot.steps.watched_steps,
        "numel": [[m["numel"], m.get("whole_numel")] for m in snapshot.config.models],
    }


def watched(folder: Path, make: Callable[[], nn.Module]) -> dict[str, Any]:
    folder.mkdir(mode=0o700)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    os.environ["ZEROMON_RUN_DIR"] = str(folder)
    zeromon_agents.start()
    train(make)
    assert BOOTSTRAP.agent is not None
    held = weakref.ref(mesh(RANKS))
    gc.collect()
    assert held() is None  # it was made under the hook, and nothing keeps it
    errors, kept = BOOTSTRAP.agent.guard.errors, zeromon_agents.stop()
    dist.destroy_process_group()
    return {**seen(folder), "errors": errors, "kept": kept}


def main() -> None:
    folder = Path(sys.argv[1])
    found = {case: watched(folder / case.replace(" ", "_"), CASES[case]) for case in CASES}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
