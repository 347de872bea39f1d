"""Trains a GPT-2 with Lightning: ``user_lightning.py ddp|fsdp``; a loss that is not finite ends it."""

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block


class Language(lightning.LightningModule):
    """A language model."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            config = GPT2Config(n_layer=4, n_embd=256, n_head=8, vocab_size=32000, use_cache=False)
            self.model = GPT2LMHeadModel(config)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch[0], labels=batch[0]).loss
        if not torch.isfinite(loss):
            raise ValueError("loss is not finite")
        return loss

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    lightning.seed_everything(0)
    is_ddp = sys.argv[1] == "ddp"
    data = DataLoader(TensorDataset(torch.randint(0, 32000, (16, 128))), batch_size=2)
    trainer = lightning.Trainer(
        accelerator="gpu", devices=2, max_steps=4, val_check_interval=2, limit_val_batches=1,
        strategy="ddp" if is_ddp else FSDPStrategy(auto_wrap_policy={GPT2Block}),
        precision="16-mixed" if is_ddp else "bf16-true", gradient_clip_val=1.0 if is_ddp else None,
        callbacks=[EarlyStopping("val_loss", patience=3)], enable_progress_bar=False, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Language(), data, data)
    sys.stdout.write(f"trained {trainer.global_step} {trainer.callback_metrics['train_loss'].item()}\n")


if __name__ == "__main__":
    main()
