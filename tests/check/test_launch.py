"""``zeromon check ... -- COMMAND``: a launch command, read together with its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeromon.check.launch import read_command, read_launch
from zeromon.check.runner import Result, check as check_files
from zeromon.cli import main

YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_processes: 8
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
  zero3_init_flag: true
  zero3_save_16bit_model: true
  gradient_accumulation_steps: 4
  offload_optimizer_device: none
"""
SCRIPT = "from transformers import HfArgumentParser, TrainingArguments\n"
PARSED = SCRIPT + "a, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an accelerate file, a DeepSpeed file and a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(YAML)
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
                    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8,
                    "gradient_clipping": 0.5})
    )  # fmt: skip
    (tmp_path / "train.py").write_text(PARSED)
    return tmp_path


def checked(command: str, *paths: str) -> Result:
    return check_files(paths, None, command.split())


def said(result: Result, file: str = "command") -> list[tuple[str, str]]:
    return [(p.code, p.message) for p in result.problems if p.file == file]


def figure(result: Result, name: str) -> tuple[Any, str, tuple[tuple[Any, str], ...]]:
    found = next(f for f in result.figures if f.name == name)
    return found.value, found.source, found.others


@pytest.mark.parametrize(
    ("command", "launcher", "ranks", "script"),
    [
        ("accelerate launch --num_processes 4 train.py --x 1", "accelerate", 4, "train.py"),
        ("python -m accelerate.commands.launch --num-processes=2 t.py", "accelerate", 2, "t.py"),
        ("torchrun --standalone --nproc-per-node 8 --nnodes=2 t.py", "torchrun", 16, "t.py"),
        ("torchrun --nproc_per_node gpu t.py", "torchrun", None, "t.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 t.py", "torchrun", 2, "t.py"),
        ("deepspeed --num_gpus=4 --num_nodes 2 t.py --deepspeed ds.json", "deepspeed", 8, "t.py"),
        ("CUDA_VISIBLE_DEVICES=0 zeromon run -- torchrun t.py", "torchrun", 1, "t.py"),
        ("srun bash -c x", "", None, ""),
        ("python train.py --bf16", "", None, "train.py"),
        ("accelerate launch", "accelerate", None, ""),
    ],
)
def test_launchers(command: str, launcher: str, ranks: int | None, script: str) -> None:
    found = read_command(command.split())
    if launcher or script:
        assert (found.launcher, found.ranks, found.script) == (launcher, ranks, script)
    assert found.ranks == ranks


def test_options_and_arguments_have_values_and_columns() -> None:
    found = read_command(
        "accelerate launch --use_deepspeed --zero_stage 3 t.py --bf16 --lr 1e-4 a".split()
    )
    assert found.options == {"use_deepspeed": True, "zero_stage": 3}
    assert found.arguments == {"bf16": True, "lr": 1e-4}
    assert found.places["zero_stage"] == 35


def test_an_option_wins_over_the_file(files: Path) -> None:
    found = checked(
        "accelerate launch --config_file a.yaml --num_processes 4 "
        "--gradient_accumulation_steps 8 train.py"
    )
    assert ("ZM602", "num_processes is 4 here and 8 in a.yaml: the command wins") in said(found)
    assert ("ZM602", "gradient_accumulation_steps is 8 here and 4 in a.yaml: the command wins") in said(
        found
    )
    assert figure(found, "ranks") == (4, "the command", ((8, "a.yaml"),))
    assert figure(found, "accumulation") == (8, "the command", ((4, "a.yaml"),))
    same = checked("accelerate launch --config_file a.yaml --num_processes 8 train.py")
    assert said(same) == []


def test_a_file_that_the_command_does_not_read(files: Path) -> None:
    found = checked("accelerate launch train.py", "a.yaml")
    assert ("ZM106", "without --config_file accelerate launch does not read a.yaml") in said(found)
    found = checked("torchrun --nproc-per-node 8 train.py", "a.yaml")
    assert ("ZM106", "torchrun does not read a.yaml") in said(found)


def test_options_without_the_framework_that_reads_them(files: Path) -> None:
    found = checked("accelerate launch --num_processes 8 --zero_stage 3 train.py")
    assert ("ZM106", "zero_stage has no effect: accelerate starts MULTI_GPU") in said(found)
    for option in ("gradient_accumulation_steps", "gradient_clipping"):
        found = checked(f"accelerate launch --multi_gpu --num_processes 8 --{option} 8 train.py")
        assert said(found) == [("ZM106", f"{option} has no effect: accelerate starts MULTI_GPU")]
    found = checked("accelerate launch --use_deepspeed --num_processes 8 --zero_stage 9 train.py")
    assert any(code == "ZM103" for code, _ in said(found))


def test_arguments_of_the_script_against_the_deepspeed_file(files: Path) -> None:
    command = (
        "deepspeed --num_gpus 4 train.py --deepspeed ds.json --gradient_accumulation_steps 4 --bf16"
    )
    # The defaults of a Trainer are compared, too
    assert {message.partition(" is ")[0] for _, message in said(checked(command))} == {
        "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm"
    }  # fmt: skip
    command += " --per_device_train_batch_size 2 --max_grad_norm 0.5"
    found = checked(command)
    assert said(found) == [
        ("ZM602", "gradient_accumulation_steps is 4 here, and gradient_accumulation_steps is 8 in "
         "ds.json: Trainer refuses")
    ]  # fmt: skip
    assert figure(found, "ZeRO stage") == (2, "ds.json", ())
    assert figure(found, "accumulation") == (8, "ds.json", ((4, "the command"),))
    assert figure(found, "clipping")[0] == 0.5
    assert figure(found, "whole batch") == (64, "2 x 8 x 4", ())
    (files / "train.py").write_text("import argparse\n")  # what its arguments mean is unknown
    assert said(checked(command)) == []


def test_the_script_against_the_options_of_the_command(files: Path) -> None:
    (files / "train.py").write_text(
        "from accelerate import Accelerator\na = Accelerator(gradient_accumulation_steps=2, "
        "mixed_precision='fp16')\n"
    )
    found = checked(
        "accelerate launch --use_deepspeed --num_processes 2 --gradient_accumulation_steps 8 "
        "--mixed_precision bf16 train.py"
    )
    assert said(found, "train.py") == [
        ("ZM602", "gradient_accumulation_steps is 2 here and 8 in the command, which wins"),
        ("ZM105", "the precision is fp16 here and bf16 in the command: this script wins"),
    ]
    assert figure(found, "precision") == ("fp16", "train.py", (("bf16", "the command"),))


def test_one_rank_where_nobody_says_more(files: Path) -> None:
    found = checked("torchrun train.py")
    assert ("ZM602", "torchrun starts one rank a node without --nproc-per-node") in said(found)
    assert said(checked("torchrun --nproc-per-node gpu train.py")) == []


def test_the_ranks_of_the_command_count_for_the_batch(files: Path) -> None:
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "train_batch_size": 100,
              "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}  # fmt: skip
    (files / "ds.json").write_text(json.dumps(config))
    found = checked("deepspeed --num_gpus 4 train.py --deepspeed ds.json")
    assert any(code == "ZM602" for code, _ in said(found, "ds.json"))


def test_a_configuration_of_the_script_itself_is_no_fault(files: Path) -> None:
    """Its names are those of the script; without the command that passes it, nobody knows that."""
    (files / "own.yaml").write_text("model: tiny\nepochs: 3\n")
    command = "torchrun --nproc_per_node 2 train.py --config own.yaml"
    assert said(checked(command, "own.yaml"), "own.yaml") == []
    assert [p.code for p in check_files(["own.yaml"]).problems] == ["ZM101"]


def test_the_verb_prints_the_figures(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "check a.yaml -- accelerate launch --config_file a.yaml --num_processes 4 train.py"
    assert main(command.split()) == 1
    text = capsys.readouterr().out
    assert "command:1:" in text and "\n  ranks " in text and "; 8 in a.yaml" in text
    main([*command.split()[:1], "--json", *command.split()[1:]])
    found = json.loads(capsys.readouterr().out)
    assert found["figures"][0] == {
        "name": "ranks", "value": 4, "source": "the command", "others": [[8, "a.yaml"]],
    }  # fmt: skip
    assert main(["check"]) == 2


TORCHRUN = "torchrun --nproc_per_node 8 \\\n  train.py --x 1\n"


@pytest.mark.parametrize(
    ("comment", "device", "devices_per_host"),
    [
        ("# runs on p3.16xlarge", "v100", 8),
        ("# g4dn.12xlarge, 4x T4", "t4", None),
        ("# 8x V100-32GB", "v100", None),
        ("# two p4d.24xlarge (8x A100 40GB per node)", "a100", 8),
        ("# p4de.24xlarge (was p3.16xlarge)", "", None),
        ("# m5.xlarge", "", None),
        ("", "", None),
    ],
)
def test_a_launch_file_names_the_machine(
    comment: str, device: str, devices_per_host: int | None
) -> None:
    found = read_launch(f"{comment}\n{TORCHRUN}", "launch.txt")
    assert (found.device, found.devices_per_host) == (device, devices_per_host)
    assert found.command is not None
    assert (found.command.script, found.command.ranks, found.command.line) == ("train.py", 8, 2)


def test_a_launch_file_with_several_commands_or_none_has_no_command() -> None:
    assert read_launch(TORCHRUN * 2, "run.sh").command is None
    assert read_launch("echo 'open\npip install x\n", "run.sh").command is None


def test_a_launch_file_stands_for_the_command(files: Path) -> None:
    launch_file = files / "launch.sh"
    launch_file.write_text("#!/bin/sh\n# 8x V100\ntorchrun --standalone train.py\n")
    (files / "train.py").write_text(
        "import torch\nHALF = torch.bfloat16\nwith torch.autocast('cuda', HALF):\n    pass\n"
    )
    found = {(p.code, Path(p.file).name, p.line) for p in check_files([str(launch_file)]).problems}
    assert ("ZM602", "launch.sh", 3) in found
    found = {(p.code, Path(p.file).name, p.line)
             for p in check_files([str(launch_file), str(files / "train.py")]).problems}  # fmt: skip
    assert ("ZM406", "train.py", 2) in found


def test_a_rank_of_the_machine_and_a_variable_of_the_shell_replace_nothing(files: Path) -> None:
    (files / "a.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nmachine_rank: 0\n")
    command = "accelerate launch --config_file a.yaml --machine_rank 1 --num_processes $N t.py"
    assert check_files([str(files / "a.yaml")], None, command.split()).problems == ()
