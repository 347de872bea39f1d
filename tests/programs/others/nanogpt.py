"""A loop in the style of nanoGPT: DDP, accumulation with `no_sync`, clipping, evaluation, a checkpoint.

`--spawn PORT` starts the ranks with `torch.multiprocessing.spawn` instead of a launcher.
"""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 32, 32, 2, 2
STEPS, ACCUMULATED, EVALUATE_EVERY, EVALUATED = 20, 4, 8, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x):
        parts = self.attention(self.first(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch(generator):
    rows = torch.randint(0, VOCABULARY // 4, (4, LENGTH + 1), generator=generator) * 3
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate(model, generator):
    model.eval()
    losses = torch.stack([model(*batch(generator)) for _ in range(EVALUATED)])
    model.train()
    return losses.mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337 + rank)
    model = DistributedDataParallel(GPT())
    raw = model.module
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3, fused=True)
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        if step % EVALUATE_EVERY == 0 and rank == 0:
            print(f"step {step}: val loss {evaluate(raw, data).hex()}")
            torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict()}, "ckpt.pt")
        for micro in range(ACCUMULATED):
            last = micro == ACCUMULATED - 1
            with nullcontext() if last else model.no_sync():
                loss = model(*batch(data)) / ACCUMULATED
                loss.backward()
        nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"rank {rank} iter {step}: loss {(loss.item() * ACCUMULATED).hex()}")
    dist.destroy_process_group()


def spawned(rank, ranks, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(ranks))
    main()


if __name__ == "__main__":
    if "--spawn" in sys.argv:
        torch.multiprocessing.spawn(spawned, (2, sys.argv[-1]), nprocs=2)
    else:
        main()
