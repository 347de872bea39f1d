"""Continue BERT-large MLM pre-training on in-house text (DDP, mixed precision)."""
import argparse
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_linear_schedule_with_warmup,
)


@contextmanager
def process_group():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    try:
        yield dist.get_rank(), local, dist.get_world_size()
    finally:
        dist.destroy_process_group()


def loaders(path, tok, bs, seed):
    ds = load_from_disk(path).with_format("torch")
    sampler = DistributedSampler(ds, shuffle=True, seed=seed, drop_last=True)
    collator = DataCollatorForLanguageModeling(tok, mlm_probability=0.15)
    return sampler, DataLoader(ds, batch_size=bs, sampler=sampler, collate_fn=collator,
                               num_workers=8, pin_memory=True, drop_last=True)


def parse_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/fsx/corpus/tokenized512")
    ap.add_argument("--out", default="/fsx/runs/bert-large-domain")
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=5e-5)
    ap.add_argument("--warmup", type=int, default=2000)
    ap.add_argument("--seed", type=int, default=13)
    return ap.parse_args()


AMP_DTYPE = torch.bfloat16


def train(args, rank, local):
    torch.manual_seed(args.seed)
    device = torch.device("cuda", local)
    tok = AutoTokenizer.from_pretrained("bert-large-uncased")
    model = AutoModelForMaskedLM.from_pretrained("bert-large-uncased").to(device)
    model = DDP(model, device_ids=[local], gradient_as_bucket_view=True)

    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    sampler, loader = loaders(args.data, tok, args.batch, args.seed)
    sched = get_linear_schedule_with_warmup(opt, args.warmup, len(loader) * args.epochs)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            with torch.autocast(device_type="cuda", dtype=AMP_DTYPE):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if step % 100 == 0 and rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f} lr {sched.get_last_lr()[0]:.2e}")
        if rank == 0:
            model.module.save_pretrained(os.path.join(args.out, f"epoch{epoch}"))
        dist.barrier()


if __name__ == "__main__":
    cli = parse_args()
    with process_group() as (rank, local, world):
        train(cli, rank, local)
