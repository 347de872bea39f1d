"""Trains a small Llama on GPUs by NCCL, or on CPUs by gloo: ``user_llama.py STRATEGY``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

STEPS, BATCH, LENGTH = 6, 2, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def shard_model(strategy: str, model: nn.Module) -> nn.Module:
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model.to(DEVICE))
    if strategy == "fsdp1":
        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, mixed_precision=half, device_id=torch.device(DEVICE)
        )
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(DEVICE, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return model.to(DEVICE)


def start_engine(stage: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200_000},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main() -> None:
    strategy = sys.argv[1]
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1001, hidden_size=128, intermediate_size=352, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    if not strategy.startswith("zero"):
        model = shard_model(strategy, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    if strategy.startswith("zero"):
        model = start_engine(int(strategy[4:]), model, optimizer)
    tokens = torch.randint(0, 1001, (BATCH, LENGTH), device=DEVICE)
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        if strategy.startswith("zero"):
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
