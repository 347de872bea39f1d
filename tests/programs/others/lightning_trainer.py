"""`lightning.Trainer`: `lightning_trainer.py ddp|fsdp|fsdp1|fsdp2`. It starts its second rank itself.

Accumulation, clipping, validation, checkpoints. "fsdp" is what a user writes; "fsdp1" passes by the
check of Lightning that refuses it on a CPU.
"""

import sys

import lightning
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

WIDTH = 32


class OnCPU(FSDPStrategy):
    """The check looks for the class itself."""


class Model(lightning.LightningModule):
    def __init__(self, way):
        super().__init__()
        self.way = way
        blocks = [nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)) for _ in range(3)]
        self.model = nn.Sequential(*blocks, nn.Linear(WIDTH, 2))

    def configure_model(self):
        if self.way == "fsdp2":
            for block in self.model[:-1]:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch):
        loss = self.model(batch).square().mean()
        print(f"rank {self.global_rank} loss {loss.item().hex()}")
        return loss

    def validation_step(self, batch):
        self.log("val_loss", self.model(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    way = sys.argv[1]
    strategy = {
        "ddp": "ddp",
        "fsdp": "fsdp",
        "fsdp1": OnCPU(process_group_backend="gloo", auto_wrap_policy={nn.Sequential}),
        "fsdp2": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    }[way]
    lightning.seed_everything(7)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, accumulate_grad_batches=2,
        gradient_clip_val=None if way == "fsdp1" else 1.0, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    loaders = [DataLoader(RandomDataset(WIDTH, length), 4) for length in (96, 32)]
    trainer.fit(Model(way), *loaders)
    print({name: value.item().hex() for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
