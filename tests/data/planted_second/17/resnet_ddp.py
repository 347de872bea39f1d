import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms as T


@dataclass
class Cfg:
    root: str = "/data/imagenet/train"
    ckpt: Path = Path("ckpt/last.pt")
    batch: int = 128
    epochs: int = 90
    lr: float = 0.8


class Runner:
    def __init__(self, cfg):
        self.cfg, self.start = cfg, 0
        self.rank, self.local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local)
        net = nn.SyncBatchNorm.convert_sync_batchnorm(models.resnet101()).to(self.local)
        self.model = DistributedDataParallel(net, device_ids=[self.local])
        self.opt = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, cfg.epochs)
        self.loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
        if cfg.ckpt.exists():
            self.resume()

    def resume(self):
        state = torch.load(self.cfg.ckpt, map_location="cuda:0", weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.start = state["epoch"] + 1

    def loader(self):
        tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()])
        ds = datasets.ImageFolder(self.cfg.root, tf)
        sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
        return sampler, DataLoader(ds, self.cfg.batch, sampler=sampler, num_workers=10, pin_memory=True,
                                   persistent_workers=True, drop_last=True)

    def fit(self):
        sampler, loader = self.loader()
        self.model.train()
        for epoch in range(self.start, self.cfg.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                x, y = x.to(self.local, non_blocking=True), y.to(self.local, non_blocking=True)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = self.loss_fn(self.model(x), y)
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
            self.sched.step()
            if self.rank == 0:
                self.cfg.ckpt.parent.mkdir(exist_ok=True)
                torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(),
                            "sched": self.sched.state_dict(), "epoch": epoch}, self.cfg.ckpt)
            dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("nccl")
    Runner(Cfg()).fit()
    dist.destroy_process_group()
