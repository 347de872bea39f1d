import functools
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from torchvision.models import vit_h_14


@dataclass
class Config:
    root: str = "/data/imagenet/train"
    batch: int = 64
    lr: float = 3e-4
    epochs: int = 90
    wrap: str = os.environ.get("WRAP", "layers")


def pick_policy(cfg):
    if cfg.wrap == "size":
        return functools.partial(size_based_auto_wrap_policy, min_num_params=10_000_000)
    return transformer_auto_wrap_policy


def build(cfg, rank):
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FSDP(vit_h_14(num_classes=1000), auto_wrap_policy=pick_policy(cfg), mixed_precision=bf16,
                device_id=rank, sync_module_states=True, use_orig_params=True, limit_all_gathers=True,
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE)


def main():
    cfg = Config()
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = build(cfg, rank)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.3)
    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor()])
    data = datasets.ImageFolder(cfg.root, tf)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, cfg.batch, sampler=sampler, num_workers=12, pin_memory=True,
                        persistent_workers=True, drop_last=True)
    model.train()
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(rank, non_blocking=True), y.to(rank, non_blocking=True)
            loss = F.cross_entropy(model(x).float(), y, label_smoothing=0.1)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
