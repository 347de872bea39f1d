"""Products, copies and collectives under torch.profiler; each rank exports its trace."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    matrix = torch.ones(1024, 1024, device="cuda")
    on_host = torch.ones(1 << 20).pin_memory()
    side = torch.cuda.Stream()
    dist.all_reduce(matrix)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            product = matrix @ matrix
            torch.add(product, 1)
            with torch.cuda.stream(side):
                on_host.cuda(non_blocking=True)
            dist.all_reduce(matrix)
            product.cpu()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(Path(os.environ["VGPU_DIR"]) / f"trace-{dist.get_rank()}.json"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
