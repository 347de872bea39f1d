"""The figures that `zeromon check` states for a launch, against the values in effect.

Each launch runs on one rank of the CPU: transformers' Trainer or accelerate, and DeepSpeed where it
is asked for, take an optimizer step of a small model. The values are read from their objects.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import PROGRAMS, clean_environment

from zeromon.check.runner import check

MODEL = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM
BATCHES = []  # the sequences of each forward
def tiny():
    model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, vocab_size=32))
    def count(_, arguments, named):
        BATCHES.append(len(named["input_ids"]))
    model.register_forward_pre_hook(count, with_kwargs=True)
    return model
def rows():
    tokens = torch.zeros(4, dtype=torch.long)
    return [{"input_ids": tokens, "labels": tokens}] * 64
"""
PARSED = """\
from transformers import HfArgumentParser, Trainer, TrainingArguments
from tiny_model import rows, tiny
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(model=tiny(), args=args, train_dataset=rows())
trainer.train()
"""
STATED = """\
from transformers import Trainer, TrainingArguments
from tiny_model import rows, tiny
args = TrainingArguments("out", max_steps=1, use_cpu=True, report_to="none", save_strategy="no",
    {stated})
trainer = Trainer(model=tiny(), args=args, train_dataset=rows())
trainer.train()
"""
PLAIN = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tiny_model import rows, tiny
accelerator = Accelerator({stated})
model = tiny()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(rows(), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        break
"""
BASE = "--output_dir out --max_steps 1 --use_cpu --report_to none --save_strategy no"
TORCHRUN = "torchrun --nproc_per_node 1 train.py"
ZERO2: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}  # fmt: skip
FIXED = ZERO2 | {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5, "bf16": {"enabled": True},
}  # fmt: skip
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 3e-4, "torch_adam": True}}}
AUTO_ADAM = {"optimizer": {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {
    "warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}  # fmt: skip
ACC: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
    "num_machines": 1, "num_processes": 1, "machine_rank": 0, "use_cpu": False,
}  # fmt: skip
SECTION = {"zero_stage": 1, "gradient_accumulation_steps": 4, "gradient_clipping": 0.7,
           "offload_optimizer_device": "none", "offload_param_device": "none",
           "zero3_init_flag": False}  # fmt: skip
PER_DEVICE = "--per_device_train_batch_size 2"
LAUNCH = "accelerate launch --config_file a.yaml"


def with_file(content: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"ds.json": content, "train.py": PARSED, **others}


def with_section(script: str = PARSED, **section: Any) -> dict[str, Any]:
    return {"a.yaml": ACC | {"deepspeed_config": {**SECTION, **section}}, "train.py": script}


DS = f"{TORCHRUN} --deepspeed ds.json {BASE}"
ENVIRONMENT = "env ACCELERATE_USE_DEEPSPEED=true"
LAUNCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "arguments alone": (
        f"{TORCHRUN} {BASE} {PER_DEVICE} --gradient_accumulation_steps 4 --learning_rate 3e-4 --bf16"
        " --max_grad_norm 0.3 --lr_scheduler_type cosine", {"train.py": PARSED}),
    "defaults alone": (f"{TORCHRUN} {BASE}", {"train.py": PARSED}),
    "checkpointing": (f"{TORCHRUN} {BASE} --gradient_checkpointing", {"train.py": PARSED}),
    "script alone": (TORCHRUN, {"train.py": STATED.format(
        stated="per_device_train_batch_size=4, learning_rate=2e-4, bf16=True")}),
    "auto file, arguments": (
        f"{DS} {PER_DEVICE} --gradient_accumulation_steps 4 --learning_rate 3e-4 --bf16"
        " --max_grad_norm 0.3", with_file(ZERO2)),
    "auto file, defaults": (DS, with_file(ZERO2)),
    "fixed file, the same arguments": (
        f"{DS} {PER_DEVICE} --gradient_accumulation_steps 4 --max_grad_norm 0.5 --bf16",
        with_file(FIXED)),
    "stage 1 file": (f"{DS} {PER_DEVICE} --bf16",
                     with_file(ZERO2 | {"zero_optimization": {"stage": 1}})),
    "stage 0 file": (f"{DS} {PER_DEVICE} --bf16",
                     with_file(ZERO2 | {"zero_optimization": {"stage": 0}})),
    "stage 3 file": (f"{DS} {PER_DEVICE} --bf16",
                     with_file(ZERO2 | {"zero_optimization": {"stage": 3}})),
    "clipping missing": (
        f"{DS} {PER_DEVICE} --max_grad_norm 0.3",
        with_file({k: v for k, v in ZERO2.items() if k != "gradient_clipping"})),
    "optimizer of the file, its lr": (f"{DS} --learning_rate 3e-4", with_file(ZERO2 | ADAM)),
    "optimizer of the file, lr auto": (f"{DS} --learning_rate 7e-4", with_file(ZERO2 | AUTO_ADAM)),
    "scheduler of the file": (f"{DS} --learning_rate 7e-4 --lr_scheduler_type constant_with_warmup",
                              with_file(ZERO2 | AUTO_ADAM | WARMUP)),
    "script with a file": (TORCHRUN, {"ds.json": ZERO2, "train.py": STATED.format(
        stated="deepspeed='ds.json', per_device_train_batch_size=2, gradient_accumulation_steps=2")}),
    "section, trainer": (f"{LAUNCH} train.py {BASE} {PER_DEVICE} --gradient_accumulation_steps 4"
                         " --max_grad_norm 0.7 --bf16", with_section()),
    "section, option of the command": (
        f"{LAUNCH} --zero_stage 2 --gradient_accumulation_steps 8 train.py {BASE} {PER_DEVICE}"
        " --gradient_accumulation_steps 8 --max_grad_norm 0.7 --bf16", with_section()),
    "section, other arguments": (f"{LAUNCH} train.py {BASE} {PER_DEVICE}", with_section()),
    "section, accelerator": (f"{LAUNCH} train.py", with_section(PLAIN.format(stated=""))),
    "section, accelerator that accumulates": (
        f"{LAUNCH} train.py", with_section(PLAIN.format(stated="gradient_accumulation_steps=2"))),
    "file of accelerate, accelerator": (f"{LAUNCH} train.py", {
        "a.yaml": {k: v for k, v in ACC.items() if k != "mixed_precision"}
        | {"deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": False}},
        "ds.json": FIXED, "train.py": PLAIN.format(stated="")}),
    "environment": (
        f"{ENVIRONMENT} ACCELERATE_DEEPSPEED_ZERO_STAGE=2 ACCELERATE_MIXED_PRECISION=bf16"
        f" ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 {TORCHRUN}", {"train.py": PLAIN.format(stated="")}),
    "environment, file": (
        f"{ENVIRONMENT} ACCELERATE_DEEPSPEED_CONFIG_FILE=ds.json {TORCHRUN}",
        {"ds.json": FIXED, "train.py": PLAIN.format(stated="")}),
    "environment, precision": (
        f"env ACCELERATE_MIXED_PRECISION=bf16 {TORCHRUN}",
        {"train.py": PLAIN.format(stated="cpu=True")}),
    "script against environment": (
        f"env ACCELERATE_MIXED_PRECISION=fp16 ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 {TORCHRUN}",
        {"train.py": PLAIN.format(
            stated="cpu=True, mixed_precision='bf16', gradient_accumulation_steps=2")}),
}  # fmt: skip
SCHEDULERS = {"linear": "LambdaLR", "cosine": "LambdaLR", "constant_with_warmup": "WarmupLR"}
"""Name of the figure -> class in effect; WarmupLR is what DeepSpeed has for it."""


@pytest.fixture(scope="module")
def values_in_effect(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Launch -> its folder and values; one process imports the frameworks for all of them."""
    if None in map(importlib.util.find_spec, ("transformers", "accelerate", "deepspeed")):
        pytest.skip("transformers, accelerate and deepspeed are not installed")
    folders = {}
    for name, (_, files) in LAUNCHES.items():
        folders[name] = tmp_path_factory.mktemp("launch")
        for file, content in (files | {"tiny_model.py": MODEL}).items():
            dump = json.dumps if file.endswith(".json") else yaml.safe_dump
            (folders[name] / file).write_text(content if isinstance(content, str) else dump(content))
    pairs = [(str(folders[name]), command) for name, (command, _) in LAUNCHES.items()]
    subprocess.run(
        [sys.executable, str(PROGRAMS / "resolved.py")], input=json.dumps(pairs), text=True, check=True,
        capture_output=True, env=clean_environment() | {"DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    return {name: (at, json.loads((at / "values.json").read_text())) for name, at in folders.items()}


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_figure_is_the_value_in_effect(
    name: str, values_in_effect: dict[str, tuple[Path, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, values = values_in_effect[name]
    monkeypatch.chdir(folder)
    result = check([], None, LAUNCHES[name][0].split())
    is_refused = any(problem.severity == "error" for problem in result.problems)
    assert is_refused is ("error" in values), values.get("error", result.problems)
    if is_refused:
        return
    figures = {figure.name: figure.value for figure in result.figures}
    stated = {label: figures[label] for label in values if label in figures}
    assert stated == {label: values[label] for label in stated}
    assert len(stated) >= 1
    if "scheduler" in figures:
        assert values["scheduler class"] == SCHEDULERS[figures["scheduler"]]
