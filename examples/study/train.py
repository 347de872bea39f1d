"""Trains the GPT of train_gpt.py as the study asks; it is made on the meta device, and on no host whole.

torchrun --nproc-per-node 4 examples/study/train.py zero3 --layers 34 --set overlap_comm=true

Each rank prints lines of JSON: what the allocator holds after backward, and its peak.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_gpt import GPT

STRATEGIES = ("ddp", "fsdp1", "fsdp2", "zero0", "zero1", "zero2", "zero3")
HALF = torch.bfloat16


class StudyGPT(GPT):
    """The GPT, with recomputation of the first *recomputed* layers alone."""

    recomputed = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for number, layer in enumerate(self.layers):
            is_recomputed = number < self.recomputed
            x = checkpoint(layer, x, use_reentrant=False) if is_recomputed else layer(x)
        return self.head(self.norm(x))


def make_model(options: argparse.Namespace) -> StudyGPT:
    """Returns the model, without memory for its parameters."""
    with torch.device("meta"):
        model = StudyGPT(options.width, options.layers, options.heads, options.positions, False)
    model.recomputed = options.recomputed
    return model


def empty_module(module: nn.Module) -> None:
    """Gives the parameters of *module* alone memory on the device."""
    module.to_empty(device="cuda", recurse=False)


def shard_with_torch(options: argparse.Namespace) -> nn.Module:
    """Returns the model as DDP, FSDP1 or FSDP2 trains it: parameters of 32 bits, computed in 16."""
    model = make_model(options)
    if options.strategy == "ddp":
        view = options.settings.get("gradient_as_bucket_view", False)
        model.to_empty(device="cuda")
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
    if options.strategy == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(model.layers[0])}),
            mixed_precision=MixedPrecision(param_dtype=HALF, reduce_dtype=HALF),
            device_id=torch.cuda.current_device(),
            param_init_fn=empty_module,
        )
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy).to_empty(device="cuda")


def engine_config(options: argparse.Namespace) -> dict[str, Any]:
    """Returns DeepSpeed's JSON: its defaults, with the settings of the command line."""
    zero = {"stage": int(options.strategy.removeprefix("zero")), **options.settings}
    adam: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-5}}
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": adam,
        "steps_per_print": 10**9,
    }
    if "offload_optimizer" in zero:
        adam["params"]["torch_adam"] = True
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def start_engine(options: argparse.Namespace) -> Any:
    """Returns DeepSpeed's engine."""
    import deepspeed

    config = engine_config(options)
    if options.strategy == "zero3":
        with deepspeed.zero.Init(config_dict_or_path=config):
            # within zero.Init a parameter is sharded as soon as it is made
            model = StudyGPT(options.width, options.layers, options.heads, options.positions, False)
        model.recomputed = options.recomputed
    else:
        model = make_model(options).to(HALF).to_empty(device="cuda")
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(options: argparse.Namespace) -> None:
    """Trains on random tokens."""
    is_engine = options.strategy.startswith("zero")
    model = start_engine(options) if is_engine else shard_with_torch(options)
    optimizer = None if is_engine else torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.zeros((options.batch, options.length + 1), dtype=torch.long, device="cuda")
    for step in range(1, options.steps + 1):
        with torch.autocast("cuda", HALF, enabled=options.strategy == "ddp"):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        model.backward(loss) if is_engine else loss.backward()
        held_bytes = torch.cuda.memory_allocated()
        del loss
        if optimizer is None:
            model.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        facts = {"step": step, "after_backward": held_bytes, "end": torch.cuda.memory_allocated()}
        facts |= {"rank": dist.get_rank(), "peak": torch.cuda.max_memory_allocated()}
        print("facts", json.dumps(facts), flush=True)


def read_setting(words: str) -> tuple[str, Any]:
    """``name=JSON`` as a pair."""
    name, _, value = words.partition("=")
    return name, json.loads(value)


def main() -> None:
    """Reads the command line, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--positions", type=int, default=2048, help="rows of the position embedding")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--recomputed", type=int, default=0, help="layers that are recomputed")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--set", action="append", default=[], type=read_setting, metavar="NAME=JSON",
        help="of zero_optimization, or of DDP",
    )  # fmt: skip
    options = parser.parse_args()
    options.settings = dict(options.set)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
