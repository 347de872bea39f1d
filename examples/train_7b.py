"""Trains a GPT of 7 billion parameters with FSDP2; it is made on the meta device, and on no host whole.

torchrun --nproc-per-node 8 examples/train_7b.py --batch 4
zeromon preflight --gpu h100 -- torchrun --nproc-per-node 8 examples/train_7b.py --batch 4
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_gpt import GPT


def make_model(length: int, recompute: bool, device: torch.device) -> torch.nn.Module:
    """The sharded model; each rank allocates its own shard."""
    with torch.device("meta"):
        model = GPT(4096, 34, 32, length, recompute)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def main() -> None:
    """Trains on random tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    model = make_model(options.length, options.checkpoint, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(1, options.steps + 1):
        tokens = torch.randint(256, (options.batch, options.length + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
