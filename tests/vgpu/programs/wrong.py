"""What users get wrong, one fault a run: ``wrong.py FAULT``."""

import ctypes
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

fault = sys.argv[1]
if fault == "file":
    Path("/no/such/corpus.txt").read_text()
if fault == "exit":
    sys.exit("no data in /no/such/folder")
if fault == "batch":
    import deepspeed

    config = {
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
    deepspeed.initialize(model=nn.Linear(8, 8), config=config)
dist.init_process_group("nccl")
rank, device = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(device)
if fault == "mesh":
    init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
if fault == "sleep" and rank == 1:
    time.sleep(3600)
if fault == "construct":  # as zero.Init does, whose broadcasts rank 0 does not wait for
    for number in range(20):
        dist.broadcast(torch.ones(1024, device="cuda"), 0)
        if rank == 1 and number == 5:
            ctypes.PyDLL(None).sleep(22)  # holds the lock of Python: the agent's thread stands, too
    torch.cuda.synchronize()
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[device])
optimizer = torch.optim.AdamW(model.parameters())
if fault == "triton":
    import triton
    from triton import language as tl

    @triton.jit
    def add_one(values: torch.Tensor, size: tl.constexpr) -> None:
        places = tl.arange(0, size)
        tl.store(values + places, tl.load(values + places) + 1)


for step in range(3 + rank if fault == "uneven" else 8):
    inputs = torch.randn(8, 64, device="cuda")
    if fault != "skip" or step < 2 or rank == 0:
        dist.all_gather([torch.empty_like(inputs) for _ in range(2)], inputs)
    if fault == "triton":
        add_one[(1,)](inputs, 512)
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if fault == "logarithm":
        print("logarithm", math.log(loss.item()), flush=True)
dist.destroy_process_group()
