"""ImageNet ResNet-50, DDP, large effective batch by accumulation."""
import argparse
import itertools
import os
import time

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as tf

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="/datasets/imagenet")
    p.add_argument("--micro", type=int, default=128)
    p.add_argument("--accum", type=int, default=8)
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("--base-lr", type=float, default=0.1)
    p.add_argument("--out", default="rn50")
    return p.parse_args()


def train_loader(root, micro):
    aug = tf.Compose([tf.RandomResizedCrop(224), tf.RandomHorizontalFlip(), tf.ToTensor(), tf.Normalize(MEAN, STD)])
    ds = torchvision.datasets.ImageFolder(os.path.join(root, "train"), aug)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=micro, sampler=sampler, num_workers=10, pin_memory=True,
                        drop_last=True, persistent_workers=True)
    return sampler, loader


def accuracy(model, root, device, rank, world):
    plain = tf.Compose([tf.Resize(256), tf.CenterCrop(224), tf.ToTensor(), tf.Normalize(MEAN, STD)])
    ds = torchvision.datasets.ImageFolder(os.path.join(root, "val"), plain)
    part = torch.utils.data.Subset(ds, range(rank, len(ds), world))
    hit = torch.zeros(2, device=device)
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(part, 256, num_workers=8, pin_memory=True):
            guess = model.module(x.to(device, memory_format=torch.channels_last)).argmax(1)
            hit += torch.stack([(guess == y.to(device)).sum(), torch.tensor(len(y), device=device)])
    dist.all_reduce(hit)
    model.train()
    return (hit[0] / hit[1]).item()


def main():
    args = parse()
    dist.init_process_group("nccl")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local}")
    torch.cuda.set_device(device)
    torch.manual_seed(21)

    net = torchvision.models.resnet50(weights=None).to(device, memory_format=torch.channels_last)
    net = DistributedDataParallel(net, device_ids=[local], gradient_as_bucket_view=True)
    lr = args.base_lr * args.micro * args.accum * world / 256
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-5, nesterov=True)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.01, total_iters=5)
    cos = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs - 5)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cos], milestones=[5])
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)
    sampler, loader = train_loader(args.data, args.micro)
    usable = len(loader) // args.accum * args.accum

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        t0, running = time.time(), torch.zeros((), device=device)
        for i, (x, y) in enumerate(itertools.islice(loader, usable), 1):
            x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
            y = y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = crit(net(x), y) / args.accum
            loss.backward()
            running += loss.detach()
            if i % args.accum == 0:
                opt.step()
                opt.zero_grad(set_to_none=True)
        sched.step()
        top1 = accuracy(net, args.data, device, rank, world)
        if rank == 0:
            mean = running.item() * args.accum / usable
            print(f"epoch {epoch}: loss {mean:.3f} top1 {top1:.4f} {time.time() - t0:.0f}s", flush=True)
            torch.save({"model": net.module.state_dict(), "epoch": epoch}, f"{args.out}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
