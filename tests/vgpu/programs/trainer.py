"""Trains a small Llama with the Trainer of transformers and its defaults; steps and phases are marked.

``trainer.py [--layers N] [--hidden N] [--batch N] [--steps N] [--log N]``
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from vgpu.marks import mark

VOCABULARY, LENGTH = 512, 64


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """The same sequence of tokens again and again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens = torch.arange(LENGTH) % VOCABULARY

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens, "labels": self.tokens}


class StepMarks(transformers.TrainerCallback):  # type: ignore[misc]
    """Marks each step, and where its forward and its optimizer begin."""

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        mark(f"step {state.global_step}")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        mark("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        mark("other")

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        mark(f"step {state.global_step}")


def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that marks *name* before each call."""

    @wraps(function)  # the Trainer reads the parameters of forward
    def call(*positional: Any, **keywords: Any) -> Any:
        mark(name)
        return function(*positional, **keywords)

    return call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--log", type=int, default=500, help="logging_steps; 0: the default, 500")
    options = parser.parse_args()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN has no model on the virtual device
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=options.batch,
            logging_steps=options.log or 500, report_to="none", save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        size = options.steps * options.batch * int(os.environ["WORLD_SIZE"])
        model = transformers.LlamaForCausalLM(config)
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Tokens(size),
            callbacks=[StepMarks()],
        )  # fmt: skip
        model.forward = marked("forward", model.forward)
        trainer.accelerator.backward = marked("backward", trainer.accelerator.backward)
        trainer.accelerator.clip_grad_norm_ = marked("other", trainer.accelerator.clip_grad_norm_)
        trainer.train()
        torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
