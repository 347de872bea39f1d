# DDP with accumulation, fp16 loss scaling and resume.
import argparse
import contextlib
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms


def args_():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="/datasets/places365")
    p.add_argument("--ckpt", default="last.pt")
    p.add_argument("--bs", type=int, default=64)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--epochs", type=int, default=30)
    return p.parse_args()


def sync_when(model, last):
    return contextlib.nullcontext() if last else model.no_sync()


def loader_for(root, bs):
    tf = transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])
    ds = datasets.ImageFolder(os.path.join(root, "train"), tf)
    return DataLoader(ds, bs, sampler=DistributedSampler(ds, shuffle=True, seed=3, drop_last=True),
                      num_workers=8, pin_memory=True, drop_last=True)


def save(path, model, opt, sched, scaler, epoch):
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                    "scaler": scaler.state_dict(), "epoch": epoch}, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def resume(path, model, opt, sched, scaler, local):
    if not os.path.exists(path):
        return 0
    blob = torch.load(path, map_location=f"cuda:{local}", weights_only=True)
    model.module.load_state_dict(blob["model"])
    opt.load_state_dict(blob["opt"])
    sched.load_state_dict(blob["sched"])
    scaler.load_state_dict(blob["scaler"])
    return blob["epoch"] + 1


def main():
    a = args_()
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    torch.manual_seed(3)

    net = models.convnext_large(weights=None, num_classes=365).to(device)
    model = DistributedDataParallel(net, device_ids=[local], gradient_as_bucket_view=True, static_graph=False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs)
    scaler = GradScaler("cuda")
    start = resume(a.ckpt, model, opt, sched, scaler, local)
    loader = loader_for(a.data, a.bs)
    whole = len(loader) // a.accum * a.accum

    for epoch in range(start, a.epochs):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for i, (x, y) in enumerate(itertools.islice(loader, whole), 1):
            last = i % a.accum == 0
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with sync_when(model, last):
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = F.cross_entropy(model(x), y) / a.accum
                scaler.scale(loss).backward()
            total += loss.detach()
            if last:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad(set_to_none=True)
        sched.step()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total.item() * a.accum / whole:.4f}", flush=True)
        save(a.ckpt, model, opt, sched, scaler, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
