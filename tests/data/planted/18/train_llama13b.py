"""Decoder training on ZeRO-3 with periodic and final checkpoints."""
import argparse
import itertools
import json
import os
import time

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM


class NpyBlocks(Dataset):
    def __init__(self, path, block):
        arr = np.load(path, mmap_mode="r")
        self.arr = arr[: arr.size // block * block].reshape(-1, block)

    def __len__(self):
        return self.arr.shape[0]

    def __getitem__(self, i):
        return {"input_ids": torch.from_numpy(self.arr[i].astype(np.int64))}


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


class Meter:
    def __init__(self):
        self.t, self.n = time.time(), 0

    def tick(self, tokens):
        self.n += tokens

    def rate(self):
        r = self.n / (time.time() - self.t)
        self.t, self.n = time.time(), 0
        return r


class Checkpointer:
    def __init__(self, engine, root, every):
        self.engine, self.root, self.every = engine, root, every

    def maybe(self, step):
        if step % self.every == 0:
            self.write(f"step_{step:07d}", step)

    def write(self, tag, step):
        if is_main_process():
            print(f"writing {self.root}/{tag}", flush=True)
            self.engine.save_checkpoint(self.root, tag=tag, client_state={"step": step})


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--arch", default="meta-llama/Llama-2-13b-hf")
    ap.add_argument("--npy", required=True)
    ap.add_argument("--block", type=int, default=4096)
    ap.add_argument("--steps", type=int, default=50000)
    ap.add_argument("--every", type=int, default=1000)
    ap.add_argument("--root", default="/ckpt/llama13b-scratch")
    ap.add_argument("--zero-config", default="zero3.json")
    ap.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return ap.parse_args()


def main():
    args = parse()
    deepspeed.init_distributed("nccl")
    torch.cuda.set_device(args.local_rank)
    torch.manual_seed(0)
    with open(args.zero_config) as f:
        ds = json.load(f)

    cfg = AutoConfig.from_pretrained(args.arch)
    cfg.use_cache = False
    with deepspeed.zero.Init(config_dict_or_path=ds):
        model = AutoModelForCausalLM.from_config(cfg)
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds)

    data = NpyBlocks(args.npy, args.block)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler,
                        num_workers=4, pin_memory=True, drop_last=True)

    def stream():
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader

    feed, meter, ckpt = stream(), Meter(), Checkpointer(engine, args.root, args.every)
    for step in range(1, args.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            ids = next(feed)["input_ids"].to(engine.device, non_blocking=True)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            meter.tick(ids.numel() * dist.get_world_size())
        if step % 10 == 0 and is_main_process():
            print(f"step {step} loss {loss.item():.4f} {meter.rate():.0f} tok/s", flush=True)
        ckpt.maybe(step)
    ckpt.write("final", args.steps)


if __name__ == "__main__":
    main()
