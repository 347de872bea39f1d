"""Trains a small Llama by the Trainer of transformers: `device_trainer.py CASE`, as device_job.py."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from device_job import CASE, SETTINGS, STEPS, begin_training, finish, lines, start
from vgpu.marks import mark
from vgpu.programs.trainer import LENGTH, VOCABULARY, Tokens, marked


class StepMarks(transformers.TrainerCallback):  # type: ignore[misc]
    """Marks each step, and where its optimizer begins; the monitor's lines are around the step."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **others: Any) -> None:
        self.stack.enter_context(lines.each_step(others["model"]))
        mark(f"step {state.global_step}")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        mark("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        mark("other")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.stack.close()


def main() -> None:
    start()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=SETTINGS["hidden"], intermediate_size=4 * SETTINGS["hidden"],
        num_hidden_layers=SETTINGS["layers"], num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    sequences = SETTINGS["batch"] // LENGTH
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arguments = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=sequences, logging_steps=10,
            report_to="none", save_strategy="no", disable_tqdm=True, seed=CASE["seed"],
            ddp_bucket_cap_mb=SETTINGS["bucket_mb"], dataloader_pin_memory=False,
        )  # fmt: skip
        data = Tokens(STEPS * sequences * int(os.environ["WORLD_SIZE"]))
        model = transformers.LlamaForCausalLM(config)
        marks = StepMarks(stack)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[marks])
        trainer.compute_loss = marked("forward", trainer.compute_loss)
        trainer.accelerator.backward = marked("backward", trainer.accelerator.backward, "other")
        started = begin_training()
        trainer.train()
        mark(f"step {STEPS}")
        torch.cuda.synchronize()
    finish(started)


if __name__ == "__main__":
    main()
