import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling
from transformers.models.bert.modeling_bert import BertLayer


def make_loader(args):
    tok = AutoTokenizer.from_pretrained("bert-large-uncased")
    data = load_from_disk(args.data)
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed, drop_last=True)
    return DataLoader(data, batch_size=args.batch, sampler=sampler, num_workers=6, pin_memory=True,
                      drop_last=True, collate_fn=DataCollatorForLanguageModeling(tok, mlm_probability=0.15))


def make_model(device):
    model = BertForMaskedLM(BertConfig.from_pretrained("bert-large-uncased"))
    return FSDP(model, device_id=device, use_orig_params=True, sync_module_states=True,
                limit_all_gathers=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={BertLayer}),
                mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def train(args, device):
    loader = make_loader(args)
    model = make_model(device)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    total = args.epochs * len(loader)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=total, pct_start=0.05)
    model.train()
    for epoch in range(args.epochs):
        for batch in loader:
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            opt.zero_grad(set_to_none=True)
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            sched.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="data/wiki_512")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--seed", type=int, default=0)
    ns = p.parse_args()
    dist.init_process_group("nccl")
    dev = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(dev)
    train(ns, dev)
    dist.destroy_process_group()
