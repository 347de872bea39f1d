r"""Trains the GPT of train_gpt.py with DeepSpeed and the JSON file given by --config.

    deepspeed --num_gpus 2 examples/train_gpt_deepspeed.py --config examples/deepspeed/zero3.json
    zeromon run -- torchrun --nproc-per-node 2 examples/train_gpt_deepspeed.py \
        --config examples/deepspeed/zero2-offload.json

Without CUDA it trains on CPUs (gloo); there --no-compile avoids DeepSpeed's compiled operators,
which take minutes to build at their first use. The script contains nothing of zeromon.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from train_gpt import GPT, Bytes, read_text


def read_config(options: argparse.Namespace) -> dict:
    """The configuration with the batch of the command line, adapted to this machine."""
    config = json.loads(Path(options.config).read_text())
    config["train_micro_batch_size_per_gpu"] = options.batch
    config["gradient_accumulation_steps"] = options.accumulate
    if options.lr:
        config["optimizer"]["params"]["lr"] = options.lr
    if options.no_compile:
        config["optimizer"]["params"]["torch_adam"] = True
        config["zero_force_ds_cpu_optimizer"] = False
    for part in ("offload_optimizer", "offload_param"):
        target = config.get("zero_optimization", {}).get(part, {})
        if target.get("device") == "nvme":
            target["nvme_path"] = options.nvme
    return config


def prepare(options: argparse.Namespace) -> None:
    """Avoids compilation, and lets CPUs compute in half precision, as the options request."""
    if options.no_compile:
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed requires AMX; the kernels work without AMX, more slowly
        get_accelerator().is_fp16_supported = lambda: True


def train(options: argparse.Namespace) -> list[float]:
    """The training loop; returns the mean loss of every optimizer step."""
    prepare(options)
    deepspeed.init_distributed()
    torch.manual_seed(options.seed)
    config = read_config(options)
    partitioned = config.get("zero_optimization", {}).get("stage") == 3
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=partitioned):
        model = GPT(options.width, options.layers, options.heads, options.length, False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable(model), config=config)
    data = Bytes(read_text(options), options.length)
    sampler = DistributedSampler(data, seed=options.seed)
    source = iter(DataLoader(data, options.batch, sampler=sampler, drop_last=True))
    losses = []
    for step in range(1, options.steps + 1):
        began, total = time.perf_counter(), 0.0
        for _ in range(options.accumulate):
            tokens, targets = (t.to(engine.device) for t in next(source))
            logits = engine(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
            total += loss.detach() / options.accumulate
        losses.append(float(total))
        if engine.global_rank == 0 and (step % options.log_every == 0 or step == options.steps):
            spent = (time.perf_counter() - began) * 1e3
            skipped = f"  skipped {engine.skipped_steps}" if engine.skipped_steps else ""
            print(f"step {step:5d}  loss {losses[-1]:.4f}  {spent:.1f} ms{skipped}", flush=True)
    engine.destroy()
    torch.distributed.destroy_process_group()
    return losses


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters for the optimizer."""
    return [p for p in model.parameters() if p.requires_grad]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parent / "deepspeed" / "zero3.json"
    parser.add_argument("--config", default=str(default), help="a DeepSpeed JSON file")
    parser.add_argument("--data", help="any file; default: the standard library's sources")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and micro-step")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps per step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, help="learning rate; default: that of the file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--nvme", default="nvme", help="folder for state that is offloaded to NVMe")
    parser.add_argument("--no-compile", action="store_true", help="use no compiled operators")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # passed by the launcher
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
