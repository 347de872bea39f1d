"""The arguments of a Trainer against its DeepSpeed file: each verdict is that of the frameworks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zeromon.check.problem import Machine, Problem
from zeromon.check.runner import Result, check
from zeromon.check.trainer_arguments import DEFAULTS

ZERO = {"zero_optimization": {"stage": 2, "overlap_comm": True}}
BATCH = {"train_micro_batch_size_per_gpu": "auto"}
ALL = {"train_batch_size": "auto", **BATCH}
BOTH = {**BATCH, "gradient_accumulation_steps": "auto"}
ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": ADAM, "scheduler": {"type": kind, "params": params}}


AUTO_WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
LAUNCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # settings of the file beside ZeRO-2, arguments
    "accumulation missing, whole batch auto": (ALL, {"gradient_accumulation_steps": 2}),
    "accumulation missing": (BATCH, {"gradient_accumulation_steps": 2}),
    "accumulation auto": (BOTH, {"gradient_accumulation_steps": 2}),
    "accumulation missing, of 1": (ALL, {"per_device_train_batch_size": 4}),
    "micro-batch fixed, default another": ({"train_micro_batch_size_per_gpu": 2}, {}),
    "micro-batch fixed, the same": (
        {"train_micro_batch_size_per_gpu": 2}, {"per_device_train_batch_size": 2}),
    "whole batch fixed": (BOTH | {"train_batch_size": 64}, {"per_device_train_batch_size": 4}),
    "no batch": ({}, {}),
    "clipping missing": (BATCH, {"max_grad_norm": 0.3}),
    "clipping fixed": (BATCH | {"gradient_clipping": 0.5}, {}),
    "clipping fixed to the default": (BATCH | {"gradient_clipping": 1.0}, {}),
    "lr fixed": (BATCH | adam(lr=1e-4), {}),
    "lr fixed, the same": (BATCH | adam(lr=1e-4), {"learning_rate": 1e-4}),
    "lr missing": (BATCH | adam(weight_decay=0.0), {"learning_rate": 2e-5}),
    "betas fixed": (BATCH | adam(lr="auto", betas=[0.9, 0.95]), {}),
    "betas missing": (BATCH | adam(lr="auto"), {"adam_beta2": 0.95}),
    "betas fixed, the same": (BATCH | adam(lr="auto", betas=[0.9, 0.95]), {"adam_beta2": 0.95}),
    "decay fixed": (BATCH | adam(lr="auto", weight_decay=0.1), {}),
    "eps fixed": (BATCH | adam(lr="auto", eps=1e-6), {}),
    "bf16 fixed": (BATCH | {"bf16": {"enabled": True}}, {}),
    "bf16 missing": (BATCH, {"bf16": True}),
    "fp16 fixed beside bf16": (BATCH | {"fp16": {"enabled": True}}, {"bf16": True}),
    "warmup fixed": (BATCH | scheduler("WarmupLR", warmup_num_steps=100), {}),
    "warmup fixed, the same": (
        BATCH | scheduler("WarmupLR", warmup_num_steps=100), {"warmup_steps": 100}),
    "peak fixed": (BATCH | scheduler("WarmupLR", **AUTO_WARMUP | {"warmup_max_lr": 1e-3}), {}),
    "total steps fixed": (
        BATCH | scheduler("WarmupDecayLR", **AUTO_WARMUP, total_num_steps=50), {"max_steps": 100}),
    "total steps auto": (
        BATCH | scheduler("WarmupDecayLR", **AUTO_WARMUP, total_num_steps="auto"), {"max_steps": 100}),
    "no ZeRO section": (BATCH | {"zero_optimization": None}, {}),
}  # fmt: skip

REALITY = """
import json, sys
from types import SimpleNamespace
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.config import DeepSpeedConfig
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
for config, arguments in json.load(sys.stdin):
    try:
        args = TrainingArguments("o", use_cpu=True, **arguments)
        mine = HfTrainerDeepSpeedConfig(config)
        mine.trainer_config_process(args)
        DeepSpeedPlugin(hf_ds_config=mine).set_mixed_precision("no")
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
        mine.trainer_config_finalize(args, model, 100)
        engine = DeepSpeedConfig(mine.config)
        print("zeromon:", json.dumps([engine.gradient_accumulation_steps, engine.gradient_clipping]))
    except Exception as error:
        print("zeromon:", json.dumps(str(error)[:200]))
fields = TrainingArguments.__dataclass_fields__
print("defaults:", json.dumps({name: fields[name].default for name in sys.argv[1].split()}))
"""


def settings_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (ZERO | settings).items() if value is not None}


def problems_of(
    folder: Path, settings: dict[str, Any], arguments: dict[str, Any], command: str = ""
) -> Result:
    (folder / "ds.json").write_text(json.dumps(settings_of(settings)))
    stated = "".join(f", {name}={value!r}" for name, value in arguments.items())
    call = f"TrainingArguments('o', deepspeed='ds.json'{stated})\n"
    (folder / "train.py").write_text(f"from transformers import TrainingArguments\n{call}")
    return check([str(folder / "train.py")], Machine(devices=1), command.split())


def errors_of(found: Result) -> list[Problem]:
    return [problem for problem in found.problems if problem.severity == "error"]


def test_transformers_and_deepspeed_refuse_what_is_an_error_here(tmp_path: Path) -> None:
    """In a process of its own, on one rank: the files go through the frameworks' own functions."""
    if None in map(importlib.util.find_spec, ("transformers", "accelerate", "deepspeed")):
        pytest.skip("transformers, accelerate and deepspeed are not installed")
    cases = [(settings_of(settings), arguments) for settings, arguments in LAUNCHES.values()]
    command = [sys.executable, "-c", REALITY, " ".join(DEFAULTS)]
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    real = [json.loads(value) for word, _, value in lines if word == "zeromon"]
    [defaults] = [json.loads(value) for word, _, value in lines if word == "defaults"]
    assert defaults == DEFAULTS
    for (name, (settings, arguments)), verdict in zip(LAUNCHES.items(), real, strict=True):
        errors = errors_of(problems_of(tmp_path, settings, arguments))
        assert bool(errors) is isinstance(verdict, str), (name, errors, verdict)
