"""Starts launches as accelerate and torchrun do, on one rank of the CPU, and prints the values in effect.

A list of ``[folder, command]`` comes as JSON on the standard input. For each, a process forked from this
one runs the command's script, up to its first optimizer step. One line of JSON has what the objects of
transformers, accelerate and DeepSpeed hold then, or the error that they raised.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import socket
import sys
import traceback
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: F401
import torch
import transformers
from accelerate.commands import launch as accelerate_launch
from accelerate.utils import launch as accelerate_environment

RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def split_command(command: str) -> tuple[dict[str, str], list[str]]:
    """The environment, and the script with its arguments, as the command's launcher sets them."""
    words = shlex.split(command)
    words = words[1:] if words[0] == "env" else words
    variables: dict[str, str] = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    os.environ.update(variables)
    if words[0] == "torchrun":
        script = next(index for index, word in enumerate(words) if word.endswith(".py"))
        return variables, words[script:]
    assert words[:2] == ["accelerate", "launch"], words
    parser = accelerate_launch.launch_command_parser()
    options, _, _ = accelerate_launch._validate_launch_command(parser.parse_args(words[2:]))
    if options.use_deepspeed:
        _, made = accelerate_environment.prepare_deepspeed_cmd_env(options)
    else:
        made = accelerate_environment.prepare_multi_gpu_env(options)
    return {**variables, **made}, [options.training_script, *options.training_script_args]


class FirstStepDone(Exception):  # noqa: N818
    """Ends the script after its first optimizer step."""


def values_of_engine(engine: Any) -> dict[str, Any]:
    kinds = {"bf16": engine.bfloat16_enabled(), "fp16": engine.fp16_enabled()}
    zero = engine._config.zero_config
    return {
        "micro-batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(),
        "ZeRO stage": engine.zero_optimization_stage(),
        "precision": next((name for name, is_on in kinds.items() if is_on), "fp32"),
        "whole batch": engine.train_batch_size(),
        "offload of optimizer": str(getattr(zero.offload_optimizer, "device", "none")).rpartition(".")[2],
    }


def values_of_trainer(trainer: Any) -> dict[str, Any]:
    arguments, accelerator = trainer.args, trainer.accelerator
    values = {
        "micro-batch": trainer._train_batch_size,
        "accumulation": accelerator.gradient_accumulation_steps,
        "clipping": arguments.max_grad_norm,
        "precision": "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision,
        "whole batch": trainer._train_batch_size * accelerator.gradient_accumulation_steps,
    }
    engine = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if engine is not None:
        values |= values_of_engine(engine.engine)
    scheduler = trainer.lr_scheduler
    base = getattr(scheduler, "base_lrs", None) or getattr(scheduler, "max_lrs", None)
    inner = getattr(scheduler, "scheduler", scheduler)
    base = base or getattr(inner, "base_lrs", None)
    return values | {
        "learning rate": base[0] if base else None,
        "scheduler class": type(inner).__name__,
        "checkpointing": trainer.model.is_gradient_checkpointing,
    }


def values_of_accelerator(accelerator: Any) -> dict[str, Any]:
    precision = accelerator.mixed_precision
    values = {
        "accumulation": accelerator.gradient_accumulation_steps,
        "precision": "fp32" if precision == "no" else precision,
    }
    engine = accelerator.deepspeed_engine_wrapped
    return values | (values_of_engine(engine.engine) if engine is not None else {})


def run(folder: str, command: str) -> dict[str, Any]:
    os.chdir(folder)
    sys.path.insert(0, folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables, words = split_command(command)
    os.environ.update({**variables, **RANK, "MASTER_PORT": port})
    sys.argv = words
    try:
        namespace = runpy.run_path(words[0], run_name="__main__")
    except (Exception, SystemExit):
        return {"error": traceback.format_exc(limit=-2)}
    if "trainer" in namespace:
        return values_of_trainer(namespace["trainer"])
    return values_of_accelerator(namespace["accelerator"])


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for folder, command in json.load(sys.stdin):
        pid = os.fork()
        if not pid:
            with open(os.path.join(folder, "values.json"), "w") as file:
                json.dump(run(folder, command), file, default=str)
                file.flush()
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
