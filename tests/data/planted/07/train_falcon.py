#!/usr/bin/env python3
"""Falcon-7B continued pre-training, DeepSpeed configured from Python."""
import argparse
import copy
import os

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModelForCausalLM

PINNED_CPU = {"device": "cpu", "pin_memory": True}

ZERO = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": int(2e8),
    "allgather_bucket_size": int(2e8),
}

BASE = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "steps_per_print": 200,
    "zero_optimization": {
        **ZERO,
        "stage": 2,
        "offload_optimizer": PINNED_CPU,
        "offload_param": PINNED_CPU,
    },
}


def ds_config(micro, accum):
    cfg = copy.deepcopy(BASE)
    cfg["train_micro_batch_size_per_gpu"] = micro
    cfg["gradient_accumulation_steps"] = accum
    return cfg


class Stream(Dataset):
    def __init__(self, path, seq):
        self.seq = seq
        self.ids = np.load(path, mmap_mode="r")

    def __len__(self):
        return self.ids.size // self.seq

    def __getitem__(self, k):
        a = np.asarray(self.ids[k * self.seq:(k + 1) * self.seq], dtype=np.int64)
        return torch.from_numpy(a)


def decay_groups(model, wd):
    yes, no = [], []
    for name, p in model.named_parameters():
        (no if p.ndim < 2 or "ln" in name else yes).append(p)
    return [{"params": yes, "weight_decay": wd}, {"params": no, "weight_decay": 0.0}]


def main(a):
    deepspeed.init_distributed("nccl")
    torch.cuda.set_device(a.local_rank)
    torch.manual_seed(a.seed)

    model = AutoModelForCausalLM.from_pretrained(a.model, torch_dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False

    optimizer = DeepSpeedCPUAdam(decay_groups(model, 0.1), lr=a.lr, betas=(0.9, 0.95), adamw_mode=True)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(a.micro, a.accum))

    ds = Stream(a.tokens, a.seq)
    sampler = DistributedSampler(ds, shuffle=True, seed=a.seed, drop_last=True)
    loader = DataLoader(ds, batch_size=a.micro, sampler=sampler, num_workers=4, pin_memory=True)

    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for i, x in enumerate(loader):
            x = x.to(engine.device, non_blocking=True)
            loss = engine(input_ids=x, labels=x).loss
            engine.backward(loss)
            engine.step()
            if i % (10 * a.accum) == 0 and dist.get_rank() == 0:
                print(f"{epoch}:{engine.global_steps} {loss.item():.4f}", flush=True)
        engine.save_checkpoint(a.out)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="tiiuae/falcon-7b")
    ap.add_argument("--tokens", default="/data/refined.npy")
    ap.add_argument("--out", default="/ckpt/falcon7b")
    ap.add_argument("--seq", type=int, default=2048)
    ap.add_argument("--micro", type=int, default=1)
    ap.add_argument("--accum", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--lr", type=float, default=3e-5)
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    main(ap.parse_args())
