#!/usr/bin/env python
"""Resumable DDP training of a seq2seq transformer on speech units."""
import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STOP = False


def _on_term(*_):
    global STOP
    STOP = True


class Units(nn.Module):
    def __init__(self, vocab=2004, d=1024):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(1024, d)
        self.tr = nn.Transformer(d, nhead=16, num_encoder_layers=12, num_decoder_layers=12,
                                 dim_feedforward=4096, batch_first=True, norm_first=True)
        self.out = nn.Linear(d, vocab)

    def _e(self, t):
        return self.emb(t) + self.pos(torch.arange(t.size(1), device=t.device))

    def forward(self, src, tgt):
        causal = self.tr.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        return self.out(self.tr(self._e(src), self._e(tgt), tgt_mask=causal))


class State:
    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched, self.epoch = model, opt, sched, 0

    def dump(self, path):
        tmp = Path(str(path) + ".tmp")
        torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(),
                    "sched": self.sched.state_dict(), "epoch": self.epoch}, tmp)
        tmp.rename(path)

    def restore(self, path):
        blob = torch.load(path, map_location="cuda:0", weights_only=True)
        self.model.module.load_state_dict(blob["model"])
        self.opt.load_state_dict(blob["opt"])
        self.sched.load_state_dict(blob["sched"])
        self.epoch = blob["epoch"]


def any_stop(device):
    flag = torch.tensor(int(STOP), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--units", default="units.pt")
    ap.add_argument("--ckpt", type=Path, default=Path("ckpt/last.pt"))
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--bs", type=int, default=24)
    args = ap.parse_args()
    signal.signal(signal.SIGTERM, _on_term)

    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.manual_seed(8)

    model = DDP(Units().to(device), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    state = State(model, opt, sched)
    if args.ckpt.exists():
        state.restore(args.ckpt)

    raw = torch.load(args.units, map_location="cpu", weights_only=True)
    ds = TensorDataset(raw["src"], raw["tgt"])
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    dl = DataLoader(ds, args.bs, sampler=sampler, num_workers=2, pin_memory=True)
    ce = nn.CrossEntropyLoss(ignore_index=0)

    for epoch in range(state.epoch, args.epochs):
        sampler.set_epoch(epoch)
        for i, (src, tgt) in enumerate(dl):
            src, tgt = src.to(device, non_blocking=True), tgt.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(src, tgt[:, :-1])
            loss = ce(logits.float().flatten(0, 1), tgt[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if rank == 0 and i % 200 == 0:
                print(f"{epoch}.{i} {loss.item():.3f}", flush=True)
        sched.step()
        state.epoch = epoch + 1
        if rank == 0:
            args.ckpt.parent.mkdir(parents=True, exist_ok=True)
            state.dump(args.ckpt)
        dist.barrier()
        if any_stop(device):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
