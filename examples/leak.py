r"""A training loop that leaks: it logs a metric that holds its graph.

    zeromon run -- torchrun --nproc-per-node 2 examples/leak.py

`zeromon attach` names the step at which memory runs out, long before that step. In a container, or a
cgroup with a memory limit, the kernel then kills a rank, and `zeromon report` states the cause.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from train_gpt import GPT, Bytes


def main() -> None:
    """Trains, and logs the entropy of every step's predictions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=2, help="samples per rank: each leaks 0.9 MiB")
    parser.add_argument("--item", action="store_true", help="log numbers, which hold no graph: the fix")
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = GPT(64, 2, 2, 128, False).to(device)
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Bytes(Path(__file__).read_bytes(), 128)
    entropies = []
    for step in range(1, options.steps + 1):
        tokens, targets = (torch.stack([t] * options.batch).to(device) for t in data[step % len(data)])
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # A backward would free what this graph saved; a metric has none
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        if options.item:
            entropies.append(entropy.item())
        else:
            entropies.append(entropy)  # the leak
        if rank == 0 and step % 50 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
