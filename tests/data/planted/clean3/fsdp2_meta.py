"""Decoder pre-training with FSDP2, meta-device initialisation, DCP checkpoints."""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

DIM, HEADS, DEPTH, CTX, VOCAB = 4096, 32, 32, 2048, 50304


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, DIM))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(CTX, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def init_weights(self):
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
            elif isinstance(m, nn.LayerNorm):
                nn.init.ones_(m.weight)
                nn.init.zeros_(m.bias)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.norm(x))


class Mem(Dataset):
    def __init__(self, path):
        self.d = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self):
        return (len(self.d) - 1) // CTX

    def __getitem__(self, i):
        w = torch.from_numpy(self.d[i * CTX:(i + 1) * CTX + 1].astype(np.int64))
        return w[:-1], w[1:]


def build(seed):
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Decoder()
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, blk in enumerate(model.blocks):
        # the last block's backward follows at once, so it stays gathered
        fully_shard(blk, mp_policy=mp, reshard_after_forward=i < DEPTH - 1)
    fully_shard(model, mp_policy=mp)
    model.to_empty(device="cuda")
    model.init_weights()
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--bin", default="/data/train.bin")
    ap.add_argument("--bs", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=1)
    a = ap.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    model = build(seed=6)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    ds = Mem(a.bin)
    sampler = DistributedSampler(ds, drop_last=True)
    dl = DataLoader(ds, a.bs, sampler=sampler, num_workers=4, pin_memory=True)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for it, (x, y) in enumerate(dl):
            logits = model(x.cuda(non_blocking=True))
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.cuda(non_blocking=True).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if it % 100 == 0 and dist.get_rank() == 0:
                print(f"{epoch} {it} {loss.item():.4f}", flush=True)
        weights, optim = get_state_dict(model, opt)
        dcp.save({"model": weights, "optim": optim}, checkpoint_id=f"ckpt/e{epoch}")
    final = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(final, "ckpt/final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
