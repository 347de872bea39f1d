import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms as T

ACCUM, BATCH, EPOCHS, CKPT = 4, 64, 30, "last.pt"


def make_loader():
    tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()])
    ds = datasets.ImageFolder("/data/imagenet/train", tf)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return sampler, DataLoader(ds, BATCH, sampler=sampler, num_workers=8, pin_memory=True,
                               persistent_workers=True, drop_last=True)


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    net = models.convnext_large().to(local)
    model = DDP(net, device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    start = 0
    if os.path.exists(CKPT):
        state = torch.load(CKPT, map_location="cpu", weights_only=True)
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        start = state["epoch"] + 1
    sampler, loader = make_loader()
    usable = len(loader) - len(loader) % ACCUM
    model.train()
    for epoch in range(start, EPOCHS):
        sampler.set_epoch(epoch)
        opt.zero_grad(set_to_none=True)
        for i, (x, y) in enumerate(loader):
            if i >= usable:
                break
            x, y = x.to(local, non_blocking=True), y.to(local, non_blocking=True)
            last = (i + 1) % ACCUM == 0
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x), y) / ACCUM
                loss.backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, CKPT)
            dist.barrier()
        else:
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
