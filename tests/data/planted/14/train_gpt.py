import argparse
import dataclasses
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclasses.dataclass
class Config:
    vocab: int = 50304
    ctx: int = 1024
    dim: int = 2560
    layers: int = 32
    heads: int = 32


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.ln1, self.ln2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.qkv = nn.Linear(c.dim, 3 * c.dim, bias=False)
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.up, self.down = nn.Linear(c.dim, 4 * c.dim), nn.Linear(4 * c.dim, c.dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab, c.dim), nn.Embedding(c.ctx, c.dim)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.layers)])
        self.ln, self.head = nn.LayerNorm(c.dim), nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


class Bin(Dataset):
    def __init__(self, path, ctx):
        self.d, self.ctx = np.memmap(path, dtype=np.uint16, mode="r"), ctx

    def __len__(self):
        return (len(self.d) - 1) // self.ctx

    def __getitem__(self, i):
        w = torch.from_numpy(self.d[i * self.ctx:(i + 1) * self.ctx + 1].astype(np.int64))
        return w[:-1], w[1:]


def make_optimizer(model, lr=1.6e-4, wd=0.1):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": wd}, {"params": rest, "weight_decay": 0.0}],
                             lr=lr, betas=(0.9, 0.95))


def apply_fsdp(model):
    kw = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for layer in model.layers:
        fully_shard(layer, **kw)
    fully_shard(model, **kw)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--bin", default="/data/owt/train.bin")
    ap.add_argument("--bs", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=1)
    a = ap.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(1337)
    c = Config()
    model = GPT(c).cuda()
    optimizer = make_optimizer(model)
    apply_fsdp(model)
    ds = Bin(a.bin, c.ctx)
    sampler = DistributedSampler(ds, drop_last=True)
    dl = DataLoader(ds, a.bs, sampler=sampler, num_workers=4, pin_memory=True)
    total = a.epochs * len(dl)
    sched = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 1000) * 0.5 * (1 + math.cos(math.pi * min(1.0, s / total))))
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for it, (x, y) in enumerate(dl):
            logits = model(x.cuda(non_blocking=True))
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.cuda(non_blocking=True).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sched.step()
            optimizer.zero_grad(set_to_none=True)
            if it % 100 == 0 and dist.get_rank() == 0:
                print(it, loss.item(), flush=True)
        msd, osd = get_state_dict(model, optimizer)
        dcp.save({"model": msd, "optim": osd}, checkpoint_id=f"ckpt/epoch{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
