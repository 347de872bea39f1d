# Llama-3-8B domain adaptation, FSDP2.
import argparse
import itertools
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup


def setup():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return dist.get_rank(), torch.device("cuda", torch.cuda.current_device())


def shard(model):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    return model


def stack(rows):
    return torch.tensor([r["input_ids"] for r in rows])


def batches(path, bs):
    ds = load_from_disk(path)  # fixed length 4096
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return sampler, DataLoader(ds, batch_size=bs, sampler=sampler, collate_fn=stack, num_workers=4, pin_memory=True)


def export(model, where, rank):
    opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=opts)
    if rank == 0:
        os.makedirs(where, exist_ok=True)
        torch.save(state, os.path.join(where, "model.pt"))
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="meta-llama/Meta-Llama-3-8B")
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", default="out")
    ap.add_argument("--bs", type=int, default=1)
    ap.add_argument("--accum", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--lr", type=float, default=1e-5)
    args = ap.parse_args()
    rank, device = setup()
    torch.manual_seed(17)

    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.float32,
                                                 attn_implementation="sdpa")
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    sampler, loader = batches(args.data, args.bs)
    per_epoch = len(loader) // args.accum
    updates = args.epochs * per_epoch
    sched = get_cosine_schedule_with_warmup(optimizer, updates // 50, updates)

    model.train()
    done = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for micro, ids in enumerate(itertools.islice(loader, per_epoch * args.accum), start=1):
            ids = ids.to(device, non_blocking=True)
            last = micro % args.accum == 0
            model.set_requires_gradient_sync(last)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / args.accum).backward()
            if not last:
                continue
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sched.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            if done % 10 == 0:
                gn = norm.full_tensor()
                if rank == 0:
                    print(f"{done}/{updates} loss {loss.item():.4f} gnorm {gn.item():.2f}", flush=True)
        export(model, f"{args.out}/epoch{epoch}", rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
