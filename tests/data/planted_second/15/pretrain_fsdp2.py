import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class LM(nn.Module):
    def __init__(self, vocab=50304, d=2048, n=24, heads=16, seq=1024):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(seq, d)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(d, heads, 4 * d, batch_first=True,
                                                               norm_first=True) for _ in range(n))
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, x):
        t = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=x.device)
        h = self.emb(x) + self.pos(torch.arange(t, device=x.device))
        for b in self.blocks:
            h = b(h, src_mask=mask.to(h.dtype), is_causal=True)
        return self.head(h)


class Tokens(Dataset):
    def __init__(self, path, seq):
        self.t, self.seq = np.memmap(path, dtype=np.uint16, mode="r"), seq

    def __len__(self):
        return (len(self.t) - 1) // self.seq

    def __getitem__(self, i):
        c = torch.from_numpy(self.t[i * self.seq:(i + 1) * self.seq + 1].astype(np.int64))
        return c[:-1], c[1:]


def make_optimizer(model, lr):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def apply_fsdp(model):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=mp)
    fully_shard(model, mp_policy=mp)


def main(a):
    dist.init_process_group("nccl")
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(dev)
    torch.manual_seed(1)
    model = LM().to(dev)
    opt = make_optimizer(model, a.lr)
    apply_fsdp(model)
    ds = Tokens(a.data, 1024)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, a.batch, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"ckpt/{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="tokens.bin")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--epochs", type=int, default=1)
    main(p.parse_args())
