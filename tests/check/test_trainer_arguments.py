"""The arguments of a Trainer against its DeepSpeed file: each verdict is that of the frameworks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zeromon.check.launch_figures import DEFAULTS
from zeromon.check.problem import Machine, Problem
from zeromon.check.runner import Result, check

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

MICRO = {"train_micro_batch_size_per_gpu": 2}
ALONE: dict[str, tuple[dict[str, Any], str]] = {
    # settings of the file of a script that calls deepspeed.initialize, severity
    "micro-batch": ({"train_micro_batch_size_per_gpu": "auto"}, "error"),
    "whole batch": (MICRO | {"train_batch_size": "auto"}, "error"),
    "accumulation": (MICRO | {"gradient_accumulation_steps": "auto"}, "error"),
    "no batch": ({"gradient_accumulation_steps": 2}, "error"),
    "bf16": (MICRO | {"bf16": {"enabled": "auto"}}, "warning"),
    "numbers": (MICRO | {"bf16": {"enabled": True}}, ""),
    "bucket": (MICRO | {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, ""),
}

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
for config in json.loads(sys.argv[2]):
    try:
        print("alone:", json.dumps(DeepSpeedConfig(config).bfloat16_config.enabled))
    except Exception as error:
        print("alone:", json.dumps(str(error)[:200]))
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
    alone = [ZERO | settings for settings, _ in ALONE.values()]
    command = [sys.executable, "-c", REALITY, " ".join(DEFAULTS), json.dumps(alone)]
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    real = [json.loads(value) for word, _, value in lines if word == "zeromon"]
    [defaults] = [json.loads(value) for word, _, value in lines if word == "defaults"]
    assert defaults == DEFAULTS
    engine = [json.loads(value) for word, _, value in lines if word == "alone"]
    for (name, (settings, severity)), verdict in zip(ALONE.items(), engine, strict=True):
        assert (severity == "error") is isinstance(verdict, str), (name, verdict)
        assert verdict is False or severity != "warning", (name, settings)
    for (name, (settings, arguments)), verdict in zip(LAUNCHES.items(), real, strict=True):
        errors = errors_of(problems_of(tmp_path, settings, arguments))
        assert bool(errors) is isinstance(verdict, str), (name, errors, verdict)


ENGINE = "import deepspeed\nengine, *_ = deepspeed.initialize(model=m, config={config})\n"


@pytest.mark.parametrize(("settings", "severity"), ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("config", ["'ds.json'", "config", "args.config"])
def test_deepspeed_alone_fills_in_nothing(
    tmp_path: Path, settings: dict[str, Any], severity: str, config: str
) -> None:
    content = {"bf16": {"enabled": True}} | ZERO | settings
    (tmp_path / "ds.json").write_text(json.dumps(content))
    made = f"config = {content!r}\n" if config == "config" else ""
    (tmp_path / "train.py").write_text(made + ENGINE.format(config=config))
    paths = ["train.py"] if config != "args.config" else ["train.py", "ds.json"]
    problems = check([str(tmp_path / path) for path in paths]).problems
    assert {p.severity for p in problems if p.code in ("ZM103", "ZM602")} == ({severity} - {""})


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("config = load('ds.json')", True),
        ("config['train_micro_batch_size_per_gpu'] = args.batch", False),
        ("config.update({'train_batch_size': 8})", False),
    ],
)
def test_a_batch_size_that_the_script_sets_is_not_missing(
    tmp_path: Path, line: str, missing: bool
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO | {"bf16": {"enabled": True}}))
    (tmp_path / "train.py").write_text(f"{line}\n{ENGINE.format(config='config')}")
    problems = check([str(tmp_path / "ds.json"), str(tmp_path / "train.py")]).problems
    found = [(p.severity, p.fix) for p in problems if p.code == "ZM602"]
    assert found == ([("error", '"train_micro_batch_size_per_gpu": 1')] if missing else [])


@pytest.mark.parametrize(
    ("name", "severity", "words"),
    [
        ("accumulation missing, whole batch auto", "error", "engine takes 1 and refuses"),
        ("accumulation missing", "warning", "engine takes 1, though accelerate steps every 2"),
        ("clipping missing", "warning", "engine takes 1.0"),
        ("lr missing", "warning", "optimizer.params.lr is missing in"),
        ("betas missing", "warning", "engine takes [0.9, 0.999]"),
        ("lr fixed", "error", "learning_rate is 5e-05 by default, and optimizer.params.lr is 0.0001"),
    ],
)
def test_a_missing_key_is_what_the_engine_takes(
    tmp_path: Path, name: str, severity: str, words: str
) -> None:
    problems = problems_of(tmp_path, *LAUNCHES[name]).problems
    assert [p.severity for p in problems if words in p.message] == [severity]


def test_a_scheduler_and_an_optimizer_of_the_file_win(tmp_path: Path) -> None:
    settings = BOTH | scheduler("WarmupLR", **AUTO_WARMUP)
    arguments = {"lr_scheduler_type": "cosine", "optim": "adafactor"}
    messages = [p.message for p in problems_of(tmp_path, settings, arguments).problems]
    assert any("WarmupLR in" in m and "never decays" in m for m in messages)
    assert any("optim is adafactor here, and AdamW in" in m for m in messages)
    same = {"lr_scheduler_type": "constant_with_warmup", "optim": "adamw_torch"}
    messages = [p.message for p in problems_of(tmp_path, settings, same).problems]
    assert not [m for m in messages if "wins" in m]


PARSED = """
from dataclasses import dataclass, field
import transformers
from transformers import HfArgumentParser
@dataclass
class TrainingArguments(transformers.TrainingArguments):
    learning_rate: float = field(default=1e-4)
HfArgumentParser((ModelArguments, {name})).parse_args_into_dataclasses()
"""


@pytest.mark.parametrize(
    ("name", "extra", "refused"),
    [
        ("transformers.TrainingArguments", "", True),
        ("transformers.TrainingArguments", " --learning_rate 1e-4", False),
        ("transformers.TrainingArguments", " --learning_rate $RATE", False),
        ("TrainingArguments", "", False),
        ("OtherArguments", "", False),
    ],
)
def test_defaults_count_where_the_parsed_class_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str, refused: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(ZERO | BOTH | adam(lr=1e-4)))
    Path("train.py").write_text(PARSED.replace("{name}", name))
    command = f"torchrun --nproc_per_node 2 train.py --bf16 --deepspeed ds.json{extra}"
    errors = errors_of(check([], None, command.split()))
    assert [p.key for p in errors] == (["learning_rate"] if refused else [])


def test_the_batch_of_a_launch_says_what_the_engine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "torchrun --nproc_per_node 8 train.py"
    settings, arguments = LAUNCHES["accumulation missing"]
    figures = {f.name: f for f in problems_of(tmp_path, settings, arguments, command).figures}
    assert (figures["micro-batch"].value, figures["clipping"].value) == (8, 1.0)
    assert figures["accumulation"].others == ((1, "DeepSpeed's engine"),)
    assert (figures["whole batch"].value, figures["whole batch"].others[0][0]) == (128, 64)
    settings, arguments = LAUNCHES["accumulation missing, whole batch auto"]
    names = [f.name for f in problems_of(tmp_path, settings, arguments, command).figures]
    assert "whole batch" not in names


ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim
accelerator = Accelerator(gradient_accumulation_steps=4)
optimizer = {make}
"""


@pytest.mark.parametrize(
    ("settings", "make", "words"),
    [
        (adam(lr=1e-4), "torch.optim.AdamW(p)", "refuses an optimizer in"),
        ({}, "torch.optim.AdamW(p)", ""),
        ({}, "DummyOptim(p)", "refuses DummyOptim without optimizer in"),
        (adam(lr=1e-4), "DummyOptim(p)", ""),
    ],
)
def test_an_optimizer_of_script_and_file_is_refused_by_accelerate(
    tmp_path: Path, settings: dict[str, Any], make: str, words: str
) -> None:
    content = {"bf16": {"enabled": True}} | ZERO | BATCH | settings
    (tmp_path / "ds.json").write_text(json.dumps(content))
    section = "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    (tmp_path / "a.yaml").write_text(f"distributed_type: DEEPSPEED\nnum_processes: 2\n{section}")
    text = ACCELERATE.format(make=make)
    used = (
        text if "DummyOptim(" in make else text.replace("from accelerate.utils import DummyOptim\n", "")
    )
    (tmp_path / "train.py").write_text(used)
    problems = check([str(tmp_path / "a.yaml"), str(tmp_path / "train.py")]).problems
    refused = [p.message for p in problems if p.code == "ZM105"]
    assert len(refused) == bool(words)
    assert words in "".join(refused)
    # The file has no accumulation, and accelerate takes that of the file
    assert [p.message.partition(" in ")[0] for p in problems if p.code == "ZM602"] == [
        "gradient_accumulation_steps is 4 here and missing"
    ]


def test_a_section_that_nothing_reads_has_no_effect(tmp_path: Path) -> None:
    settings = BOTH | {"activation_checkpointing": {"partition_activations": True}}
    codes = [p.code for p in problems_of(tmp_path, settings, {"bf16": True}).problems]
    assert "ZM106" in codes
