"""Starts launches as accelerate and torchrun do, on one CPU rank, and prints the values in effect.

A list of ``[folder, command]`` comes as JSON on the standard input. For each, a process
forked from this one runs the command's script, up to its
first optimizer step. One line of JSON has what the objects of
transformers, accelerate and DeepSpeed hold then, or the error that they raised.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import shlex
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import transformers
from accelerate.commands import launch as accelerate_launch
from accelerate.utils import launch as accelerate_environment
from deepspeed.comm.torch import build_shm_op

FRAMEWORKS = ("torch", "transformers", "accelerate", "deepspeed")
RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


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
    started: list[Any] = []
    for name in ("deepspeed_launcher", "multi_gpu_launcher", "simple_launcher"):
        setattr(accelerate_launch, name, started.append)
    accelerate_launch.launch_command(parser.parse_args(words[2:]))
    [options] = started
    if options.use_deepspeed:
        _, made = accelerate_environment.prepare_deepspeed_cmd_env(options)
    else:
        made = accelerate_environment.prepare_multi_gpu_env(options)
    return {**variables, **made}, [options.training_script, *options.training_script_args]


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
        "offload of optimizer": str(getattr(zero.offload_optimizer, "device", "none")).rpartition(".")[
            2
        ],
    }


def values_of_trainer(trainer: Any, batches: list[int]) -> dict[str, Any]:
    arguments, accelerator = trainer.args, trainer.accelerator
    values = {
        "micro-batch": batches[0],
        "accumulation": len(batches),
        "clipping": arguments.max_grad_norm,
        "precision": "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision,
        "whole batch": sum(batches),
    }
    engine = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if engine is not None:
        values |= values_of_engine(engine.engine)
    scheduler = trainer.lr_scheduler
    inner = getattr(scheduler, "scheduler", scheduler)
    base = getattr(inner, "base_lrs", None) or getattr(inner, "max_lrs", None)
    return values | {
        "learning rate": base[0] if base else None,
        "scheduler class": type(inner).__name__,
        "checkpointing": trainer.model.is_gradient_checkpointing,
    }


def values_of_accelerator(accelerator: Any, batches: list[int]) -> dict[str, Any]:
    precision = accelerator.mixed_precision
    values = {"accumulation": len(batches), "precision": "fp32" if precision == "no" else precision}
    engine = getattr(accelerator, "deepspeed_engine_wrapped", None)
    return values | (values_of_engine(engine.engine) if engine is not None else {})


def run(folder: str, command: str) -> dict[str, Any]:
    os.chdir(folder)
    sys.path.insert(0, folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    try:
        variables, words = split_command(command)
        os.environ.update({**variables, **RANK, "MASTER_PORT": port})
        sys.argv = words
        namespace = runpy.run_path(words[0], run_name="__main__")
        batches = sys.modules["tiny_model"].BATCHES
        if "trainer" in namespace:
            return values_of_trainer(namespace["trainer"], batches)
        return values_of_accelerator(namespace["accelerator"], batches)
    except (Exception, SystemExit):
        return {"error": traceback.format_exc(limit=-2)}


def main() -> None:
    torch.set_num_threads(1)
    build_shm_op()  # once: a child that loads it looks for a compiler
    transformers.logging.set_verbosity_error()
    for folder, command in json.load(sys.stdin):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            Path(folder, "values.json").write_text(json.dumps(run(folder, command), default=str))
            imported = [name for name in sys.modules if name.partition(".")[0] in FRAMEWORKS]
            with os.fdopen(writing, "w") as pipe:
                pipe.write(" ".join(imported))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            # What a child imports late, the next one would import again: 8 seconds
            for name in pipe.read().split():
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
