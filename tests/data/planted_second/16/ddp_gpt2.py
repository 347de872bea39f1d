import argparse
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, default_data_collator


def run_epoch(model, loader, opt, dev, accum, clip):
    opt.zero_grad(set_to_none=True)
    usable = len(loader) - len(loader) % accum
    for i, batch in enumerate(loader):
        if i >= usable:
            break
        batch = {k: v.to(dev, non_blocking=True) for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss / accum
        loss.backward()
        if (i + 1) % accum == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad(set_to_none=True)
    return loss.detach() * accum


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--accum", type=int, default=16)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--clip", type=float, default=1.0)
    a = p.parse_args()
    dist.init_process_group("nccl")
    dev = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(dev)
    model = AutoModelForCausalLM.from_pretrained("gpt2-large", use_cache=False).to(dev)
    model = DDP(model, device_ids=[dev], gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    data = load_from_disk("data/packed_1k")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, a.batch, sampler=sampler, num_workers=4, pin_memory=True,
                        drop_last=True, collate_fn=default_data_collator)
    model.train()
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        last = run_epoch(model, loader, opt, dev, a.accum, a.clip)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {last.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), f"gpt2_e{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
