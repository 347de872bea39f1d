"""Trains a Hugging Face model as the options of `zeromon plan` say: ``figure.py CONFIG.json OPTIONS``.

A model of any size: its parameters are made on the meta device, and then empty on the devices.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # within zero.Init, which patches torch.Tensor, its import fails
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

FUSED_LOSS = {
    "llama": "apply_liger_kernel_to_llama", "qwen2": "apply_liger_kernel_to_qwen2",
}  # fmt: skip
"""Type of a model -> the patch of Liger's."""


META = torch.device("meta")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--framework", choices=("ddp", "fsdp1", "fsdp2", "deepspeed"))
    parser.add_argument("--stage", type=int)
    parser.add_argument(
        "--precision", choices=("mixed", "fp32", "fsdp-mixed", "pure-bf16"), default="mixed"
    )
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--offload-optimizer", choices=("device", "host"), default="device")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--lora-rank", type=int)
    parser.add_argument("--lora-targets", default="all-linear")
    parser.add_argument("--steps", type=int, default=3)
    for flag in ("checkpointing", "no-fused-attention", "fused-loss"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    options.framework = options.framework or "deepspeed"
    return options


def make_model(options: argparse.Namespace, place: AbstractContextManager[Any]) -> Any:
    """Returns the model, whose parameters are made in *place*."""
    attention = "eager" if options.no_fused_attention else "sdpa"
    settings = json.loads(options.config.read_text())
    config = transformers.AutoConfig.for_model(
        settings.pop("model_type"), **settings, use_cache=False, attn_implementation=attention
    )
    if options.fused_loss:
        import liger_kernel.transformers

        parts = dict.fromkeys(("rope", "rms_norm", "swiglu"), False)
        patch = getattr(liger_kernel.transformers, FUSED_LOSS[config.model_type])
        patch(**parts, cross_entropy=False, fused_linear_cross_entropy=True)
    is_wide = options.precision in ("fp32", "fsdp-mixed")
    with place:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if is_wide else torch.bfloat16
        )
    model.train()
    if options.lora_rank:
        import peft

        targets = options.lora_targets
        targets = targets if targets == "all-linear" else targets.split(",")
        adapters = peft.LoraConfig(
            r=options.lora_rank, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0
        )
        model.enable_input_require_grads()
        model = peft.get_peft_model(model, adapters)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(part for part in model.modules() if isinstance(part, nn.ModuleList))


def empty_module(module: nn.Module) -> None:
    """Gives the parameters and buffers of *module* alone memory on the device."""
    module.to_empty(device="cuda", recurse=False)


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    ways = {"adamw": None, "adamw-fused": {"fused": True}, "adamw-for-loop": {"foreach": False}}
    if name == "sgd":
        return torch.optim.SGD(trained, lr=1e-5)
    return torch.optim.AdamW(trained, lr=1e-5, **(ways[name] or {}))


def shard_model(options: argparse.Namespace, model: Any) -> Any:
    """Returns the model as DDP, FSDP1 or FSDP2 trains it, on the device."""
    if options.framework == "ddp":
        model.to_empty(device="cuda")
        if dist.get_world_size() == 1:
            return model
        return nn.parallel.DistributedDataParallel(model)
    half = torch.bfloat16
    if options.framework == "fsdp1":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({type(layers_of(model)[0])}),
            mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half),
            device_id=torch.cuda.current_device(), param_init_fn=empty_module,
        )  # fmt: skip
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model.to_empty(device="cuda")


def engine_config(options: argparse.Namespace) -> dict[str, Any]:
    """Returns DeepSpeed's JSON."""
    zero: dict[str, Any] = {"stage": options.stage}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }  # fmt: skip
    if options.offload_optimizer == "host":
        zero["offload_optimizer"] = {"device": "cpu"}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-5}}
    return config


def start_engine(options: argparse.Namespace) -> Any:
    """Returns DeepSpeed's engine."""
    import deepspeed

    config = engine_config(options)
    if options.stage == 3:
        model = make_model(options, deepspeed.zero.Init(config_dict_or_path=config))
    else:
        model = make_model(options, META).to_empty(device="cuda")
    optimizer = None
    if options.offload_optimizer == "device":
        optimizer = make_optimizer(options.optimizer, model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main() -> None:
    options = read_options()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    is_engine = options.framework == "deepspeed"
    model = start_engine(options) if is_engine else shard_model(options, make_model(options, META))
    optimizer = None if is_engine else make_optimizer(options.optimizer, model.parameters())
    tokens = torch.zeros((options.micro_batch, options.length), dtype=torch.long, device="cuda")
    for _ in range(options.steps):
        for left in reversed(range(options.accumulation)):
            waits = left and isinstance(model, nn.parallel.DistributedDataParallel)
            with model.no_sync() if waits else nullcontext():
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                if is_engine:
                    model.backward(loss)
                    model.step()
                else:
                    loss.backward()
                del loss
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
