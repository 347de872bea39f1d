"""Fine-tunes a Llama with the Trainer of transformers, as users do: ``user_trainer.py MODE``.

MODE is ddp, fsdp, zero2 or zero3-offload; DeepSpeed's optimizer and scheduler come from its JSON.
"""

import sys
import tempfile
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

STEPS = 4


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32000, (128,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def strategy(mode: str) -> dict[str, Any]:
    """The arguments of TrainingArguments that choose it."""
    if mode == "fsdp":
        return {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            "bf16": True,
        }
    if mode == "ddp":
        return {"fp16": True, "eval_strategy": "steps", "eval_steps": 2}
    zero: dict[str, Any] = {"stage": int(mode[4])}
    if mode.endswith("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
        },
        "zero_optimization": zero,
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    return {"deepspeed": config, "fp16": mode == "zero2", "bf16": mode != "zero2"}


def main() -> None:
    transformers.set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, max_grad_norm=1.0,
            **strategy(sys.argv[1]),
        )  # fmt: skip
        config = transformers.LlamaConfig(
            hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        data = Tokens()
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        metrics = trainer.train().metrics
        sys.stdout.write(f"trained {trainer.state.global_step} {metrics['train_loss']}\n")


if __name__ == "__main__":
    main()
