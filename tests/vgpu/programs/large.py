"""One FSDP2 step of a model of seven billion parameters, which the host never holds.

Prints JSON, a line a rank: parameters, bytes of the device, the most resident bytes of the process.
"""

from __future__ import annotations

import json
import os
import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from vgpu.programs.train import Block

LAYERS, HIDDEN = 52, 4096


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = nn.Sequential(*(Block(HIDDEN) for _ in range(LAYERS)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    model(torch.zeros(8, HIDDEN, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    facts = {
        "parameters": parameters, "states": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    print(f"rank {dist.get_rank()} facts {json.dumps(facts)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
