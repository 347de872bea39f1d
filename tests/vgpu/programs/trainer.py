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


def marked(name: str, function: Callable[..., Any], then: str = "") -> Callable[..., Any]:
    """A function that marks *name* before each call, and *then* behind it."""

    @wraps(function)
    def call(*positional: Any, **keywords: Any) -> Any:
        mark(name)
        result = function(*positional, **keywords)
        if then:
            mark(then)
        return result

    return call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=512, help="tokens of a rank in a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--log", type=int, default=500, help="logging_steps; 0: the default, 500")
    options = parser.parse_args()
    sequences = options.batch // LENGTH
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=sequences,
            logging_steps=options.log or 500, report_to="none", save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        size = options.steps * sequences * int(os.environ["WORLD_SIZE"])
        model = transformers.LlamaForCausalLM(config)
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Tokens(size),
            callbacks=[StepMarks()],
        )  # fmt: skip
        trainer.compute_loss = marked("forward", trainer.compute_loss)
        trainer.accelerator.backward = marked("backward", trainer.accelerator.backward, "other")
        trainer.train()
        torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
