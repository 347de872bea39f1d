"""Masked-patch pre-training of a plain transformer encoder with FSDP2 and bf16."""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.mlp(self.n2(x))


class Encoder(nn.Module):
    def __init__(self, patch=768, d=2048, depth=32, h=16, t=256):
        super().__init__()
        self.inp, self.head = nn.Linear(patch, d), nn.Linear(d, patch)
        self.pos = nn.Parameter(torch.randn(1, t, d) * 0.02)
        self.mask_tok = nn.Parameter(torch.zeros(1, 1, d))
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(depth))
        self.norm = nn.LayerNorm(d)

    def forward(self, patches, mask):
        x = torch.where(mask[..., None], self.mask_tok, self.inp(patches)) + self.pos
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.norm(x))


class Patches(Dataset):
    def __init__(self, path):
        self.a = np.load(path, mmap_mode="r")  # N, 256, 768 float32

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return torch.from_numpy(np.array(self.a[i]))


def parallelize(model, mesh):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=mp)
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--npy", default="/data/patches.npy")
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=20)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(5)
    model = parallelize(Encoder(), mesh)
    torch.manual_seed(5 + dist.get_rank())  # masks differ from rank to rank
    opt = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05)

    ds = Patches(args.npy)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    dl = DataLoader(ds, args.bs, sampler=sampler, num_workers=8, pin_memory=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, x in enumerate(dl):
            x = x.cuda(non_blocking=True)
            mask = torch.rand(x.shape[:2], device=x.device) < 0.75
            pred = model(x, mask)
            loss = F.mse_loss(pred.float()[mask], x[mask])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if i % 50 == 0 and dist.get_rank() == 0:
                print(epoch, i, loss.item(), flush=True)
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(sd, "encoder.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
