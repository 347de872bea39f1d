"""Batches of 4 samples of 4 ms each, and 8 ms of collation: `loaders.py WORKERS START_METHOD`."""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[Any]):
    """Samples that depend on the seed of their worker."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return index + torch.rand(4)


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    """Takes its time."""
    time.sleep(0.008)
    return torch.stack(samples)


def main() -> None:
    """Trains three epochs, and prints a checksum of what it got."""
    workers, method = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.manual_seed(0)
    loader = DataLoader(
        Samples(), batch_size=4, num_workers=workers, collate_fn=collate,
        persistent_workers=workers > 0, multiprocessing_context=method if workers else None,
    )  # fmt: skip
    model = torch.nn.Linear(4, 1)
    optimizer, mark = torch.optim.SGD(model.parameters(), 0.01), hashlib.sha1()
    for _ in range(3):
        for batch in loader:
            mark.update(batch.numpy().tobytes())
            model(batch).sum().backward()
            optimizer.step()
    print("batches", mark.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
