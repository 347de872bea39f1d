"""What users get wrong, one fault a run: ``wrong.py FAULT``."""

import math
import os
import sys
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
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[device])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3 + rank if fault == "uneven" else 8):
    inputs = torch.randn(8, 64, device="cuda")
    if fault != "skip" or step < 2 or rank == 0:
        dist.all_gather([torch.empty_like(inputs) for _ in range(2)], inputs)
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if fault == "logarithm":
        print("logarithm", math.log(loss.item()), flush=True)
dist.destroy_process_group()
