"""What a census of memory by role costs: `python tests/bench/bench_census.py`.

100 blocks of 5 linear layers, 1,000 parameter tensors, with gradients and AdamW states (4,000 tensors);
plain, and under FSDP2, a unit a block (as one of two fake ranks). Least of 20; the target is 5 ms. It is
taken at steps 1 to 3, then every 9th to the 64th, then every 65th: the last column spreads it so.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "agents"))

import torch
import torch.distributed as dist
from records import keep
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeromon_agents.observe.census import role_counts
from zeromon_agents.observe.torch_roles import Models

BLOCKS, LAYERS, EVERY = 100, 5, 65


def failed(error: BaseException, where: str) -> None:
    """Ends the benchmark: a census that fails costs less than one that counts."""
    raise SystemExit(f"{where}: {type(error).__name__}: {error}")


def trained(model: nn.Module) -> Models:
    """Returns *model* with gradients and optimizer state, as the agent registers it."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    models = Models(failed)
    models.register_module(model)
    models.register_optimizer(optimizer)
    trained.kept = (*getattr(trained, "kept", ()), model, optimizer)  # type: ignore[attr-defined]
    return models


def measure(models: Models) -> float:
    """Returns the milliseconds of one census, the least of 20."""
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        role_counts(models.claims())
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


def main() -> None:
    """Prints one line for each model."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for name in ("plain", "fsdp2"):
        model = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(32, 32) for _ in range(LAYERS))) for _ in range(BLOCKS))
        )
        if name == "fsdp2":
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        spent = measure(trained(model))
        print(
            f"{name:6} {2 * BLOCKS * LAYERS} parameter tensors: {spent:.2f} ms a census (target 5 ms), "
            f"{1e3 * spent / EVERY:.0f} us a step"
        )
        keep(name, spent, "ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
