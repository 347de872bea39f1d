"""Starts its own two ranks, by torch.multiprocessing; attention asks for cuDNN first."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def train(rank: int, ranks: int, port: str) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    torch.cuda.set_device(rank)
    torch.backends.cudnn.enabled = True
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024).cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(8):
        heads = model(torch.randn(4, 128, 1024, device="cuda")).unflatten(2, (8, 128)).bfloat16()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attended = nn.functional.scaled_dot_product_attention(*[heads.transpose(1, 2)] * 3)
        with torch.backends.cudnn.flags(enabled=True):
            nn.functional.conv1d(attended.flatten(0, 1), attended.new_ones(64, 128, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2, sys.argv[1]), nprocs=2)
