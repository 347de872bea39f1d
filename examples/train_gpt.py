"""Trains a small GPT on bytes, under any data-parallel strategy of torch.

    torchrun --nproc-per-node 2 examples/train_gpt.py --strategy fsdp2
    zeromon run -- torchrun --nproc-per-node 2 examples/train_gpt.py --strategy ddp --steps 500

The text is Python's own standard library unless --data names a file. On CUDA it runs on NCCL, else
on gloo. The script contains nothing of zeromon, and needs nothing.
"""

import argparse
import os
import sysconfig
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

STRATEGIES = (
    "none", "ddp", "zero1", "fsdp1-full", "fsdp1-grad-op", "fsdp1-hybrid", "fsdp2", "fsdp2-zero2",
)  # fmt: skip


class Bytes(Dataset):
    """Windows of *length* + 1 bytes of a text."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, layers: int, heads: int, length: int, recompute: bool) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


def wrap(model: GPT, options: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model under the chosen strategy."""
    low = torch.bfloat16 if options.precision == "bf16" else None
    if options.strategy in ("ddp", "zero1"):
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=4)
    if options.strategy.startswith("fsdp1"):
        return wrap_fsdp1(model, options.strategy, low, device)
    if options.strategy.startswith("fsdp2"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        reshard = options.strategy == "fsdp2"
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
        return fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    return model


def wrap_fsdp1(model: GPT, strategy: str, low: torch.dtype | None, device: torch.device) -> nn.Module:
    """FullyShardedDataParallel, one unit a block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    kinds = {"full": "FULL_SHARD", "grad-op": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD"}
    mesh = None
    if strategy == "fsdp1-hybrid":  # two replicas where there are ranks enough, else one
        replicas = 2 if dist.get_world_size() >= 4 else 1
        shape = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[kinds[strategy.removeprefix("fsdp1-")]],
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=MixedPrecision(param_dtype=low) if low else None,
        device_mesh=mesh,
        device_id=device,
        use_orig_params=True,
    )


def make_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW; under zero1 torch shards its state."""
    if options.strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=options.lr
        )
    return torch.optim.AdamW(model.parameters(), lr=options.lr)


def read_text(options: argparse.Namespace) -> bytes:
    """The training text."""
    if options.data:
        return Path(options.data).read_bytes()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(path.read_bytes() for path in sources)


def batches(options: argparse.Namespace, text: bytes):
    """Endless batches; each rank gets its own part."""
    data = Bytes(text, options.length)
    sampler = DistributedSampler(data, seed=options.seed) if dist.is_initialized() else None
    loader = DataLoader(
        data,
        options.batch,
        sampler=sampler,
        shuffle=sampler is None,
        drop_last=True,
        pin_memory=torch.cuda.is_available(),
    )
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def own_device() -> torch.device:
    """The accelerator of this rank, of whatever type; the CPU without one."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator().type
    index = int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count()
    torch.get_device_module(kind).set_device(index)
    return torch.device(kind, index)


def train(options: argparse.Namespace) -> list[float]:
    """The training loop; returns the loss of every step."""
    device = own_device()
    if options.strategy != "none":
        dist.init_process_group(dist.Backend.default_device_backend_map[device.type])
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(options.seed)
    model = GPT(options.width, options.layers, options.heads, options.length, options.checkpoint)
    model = wrap(model.to(device), options, device)
    optimizer = make_optimizer(model, options)
    source = batches(options, read_text(options))
    autocast = nullcontext()
    if options.precision == "bf16" and options.strategy in ("none", "ddp", "zero1"):
        autocast = torch.autocast(device.type, torch.bfloat16)
    losses = []
    for step in range(1, options.steps + 1):
        began, total = time.perf_counter(), 0.0
        for micro in range(options.accumulate):
            tokens, targets = (t.to(device, non_blocking=True) for t in next(source))
            last = micro == options.accumulate - 1
            with delay_reduction(model, last), autocast:
                logits = model(tokens)
                loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
                (loss / options.accumulate).backward()
            total += loss.detach() / options.accumulate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        if rank == 0 and (step % options.log_every == 0 or step == options.steps):
            spent = (time.perf_counter() - began) * 1e3
            print(f"step {step:5d}  loss {losses[-1]:.4f}  {spent:.1f} ms", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


def delay_reduction(model: nn.Module, last: bool):
    """Reduces accumulated gradients in the last micro-step only."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
        return nullcontext()
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=STRATEGIES, default="fsdp2")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--data", help="any file; default: the standard library's sources")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and micro-step")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps per step")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
