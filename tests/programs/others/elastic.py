"""Training that fails on rank 1 in its first attempt; the next resumes from the last checkpoint."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

STEPS, FAIL_AT, SAVE_EVERY = 16, 6, 4
CHECKPOINT = Path("snapshot.pt")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
        print(f"rank {rank} resumes after step {done}")
    for step in range(done, STEPS):
        rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(rows).square().mean()
        loss.backward()
        if step == FAIL_AT and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("a node was lost")
        optimizer.step()
        optimizer.zero_grad()
        if done:
            print(f"rank {rank} step {step + 1} loss {loss.item().hex()}")
        if (step + 1) % SAVE_EVERY == 0:
            if rank == 0:
                saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(saved | {"done": step + 1}, "partial.pt")
                Path("partial.pt").rename(CHECKPOINT)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
