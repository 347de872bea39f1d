"""Trains a small network with DDP whose samples come from slow storage: each takes 10 ms.

    zeromon run -- torchrun --nproc-per-node 2 examples/slow_loader.py
    zeromon run -- torchrun --nproc-per-node 2 examples/slow_loader.py --workers 4

`--workers` loads batches in processes of their own while the ranks compute.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

READ_SECONDS = 0.01


class SlowImages(Dataset):
    """Random images, each with the latency of a file on a network disk."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(READ_SECONDS)
        return torch.rand(256, generator=torch.Generator().manual_seed(index)), index % 10


def main() -> None:
    """Trains for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=0, help="processes per rank that load batches")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = SlowImages()
    loader = DataLoader(
        images, batch_size=16, sampler=DistributedSampler(images),
        num_workers=options.workers, persistent_workers=options.workers > 0,
    )  # fmt: skip
    for step, (pixels, labels) in enumerate(loader, 1):
        loss = F.cross_entropy(model(pixels), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
