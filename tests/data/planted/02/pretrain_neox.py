#!/usr/bin/env python
# Pre-training of a 1.4B GPT-NeoX on packed uint16 tokens, plain DeepSpeed (ZeRO-1).
import argparse
import os
import time

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


class Packed(Dataset):
    def __init__(self, path, seq):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.seq = seq

    def __len__(self):
        return len(self.tokens) // self.seq

    def __getitem__(self, i):
        chunk = self.tokens[i * self.seq:(i + 1) * self.seq]
        return torch.from_numpy(chunk.astype(np.int64))


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--tokens", required=True)
    p.add_argument("--seq", type=int, default=2048)
    p.add_argument("--epochs", type=int, default=1)
    p.add_argument("--ckpt", default="ckpt/neox1b")
    p.add_argument("--save-every", type=int, default=1000)
    p.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    p = deepspeed.add_config_arguments(p)
    return p.parse_args()


def build(seq):
    cfg = GPTNeoXConfig(
        vocab_size=50432, hidden_size=2048, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=8192, max_position_embeddings=seq, use_cache=False,
    )
    m = GPTNeoXForCausalLM(cfg)
    m.gradient_checkpointing_enable()
    return m


def main():
    args = get_args()
    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed(dist_backend="nccl")
    torch.manual_seed(1234)

    model = build(args.seq)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    data = Packed(args.tokens, args.seq)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True, seed=1234)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler,
                        num_workers=4, pin_memory=True, drop_last=True)

    gas = engine.gradient_accumulation_steps()
    t0 = time.time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for it, ids in enumerate(loader, start=1):
            ids = ids.to(engine.device, non_blocking=True)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()

            if it % (20 * gas) == 0:
                avg = loss.detach().clone()
                dist.all_reduce(avg, op=dist.ReduceOp.AVG)
                if dist.get_rank() == 0:
                    print(f"step {engine.global_steps} loss {avg.item():.4f} {time.time() - t0:.0f}s", flush=True)
            if it % (args.save_every * gas) == 0:
                engine.save_checkpoint(args.ckpt, tag=f"step{engine.global_steps}")
    engine.save_checkpoint(args.ckpt, tag="final")


if __name__ == "__main__":
    main()
