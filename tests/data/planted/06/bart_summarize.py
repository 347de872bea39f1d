"""BART-large summarisation, plain DeepSpeed engine, half precision on an older cluster."""
import argparse
import json
import os
import pathlib

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoTokenizer, BartForConditionalGeneration


class Pairs(Dataset):
    def __init__(self, path):
        with open(path) as f:
            self.rows = [json.loads(line) for line in f]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows[i]
        return r["document"], r["summary"]


class Collator:
    def __init__(self, tok, src=1024, tgt=128):
        self.tok, self.src, self.tgt = tok, src, tgt

    def __call__(self, rows):
        docs, sums = zip(*rows)
        enc = self.tok(list(docs), truncation=True, max_length=self.src, padding=True, return_tensors="pt")
        lab = self.tok(text_target=list(sums), truncation=True, max_length=self.tgt, padding=True,
                       return_tensors="pt").input_ids
        lab[lab == self.tok.pad_token_id] = -100
        return {**enc, "labels": lab}


def to_device(batch, device):
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}


def log(msg):
    if dist.get_rank() == 0:
        print(msg, flush=True)


def run(args):
    deepspeed.init_distributed()
    torch.cuda.set_device(args.local_rank)
    torch.manual_seed(args.seed)

    tok = AutoTokenizer.from_pretrained(args.model)
    model = BartForConditionalGeneration.from_pretrained(args.model)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False

    ds_cfg = json.loads(pathlib.Path(args.ds).read_text())
    engine, opt, _, sched = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_cfg
    )

    data = Pairs(args.train)
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=ds_cfg["train_micro_batch_size_per_gpu"], sampler=sampler,
                        collate_fn=Collator(tok), num_workers=6, pin_memory=True, drop_last=True)

    every = 25 * engine.gradient_accumulation_steps()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for n, batch in enumerate(loader, 1):
            loss = engine(**to_device(batch, engine.device)).loss
            engine.backward(loss)
            engine.step()
            if n % every == 0:
                log(f"[{epoch}] step {engine.global_steps} loss {loss.item():.4f} scale {opt.loss_scale}")
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="facebook/bart-large")
    p.add_argument("--train", default="data/xsum_train.jsonl")
    p.add_argument("--ds", default="ds_fp16.json")
    p.add_argument("--out", default="runs/bart-large-xsum")
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    run(p.parse_args())
