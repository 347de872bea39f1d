"""Trains a small stack of blocks on CUDA by any strategy; its steps, phases and units are marked.

``train.py STRATEGY [--layers N] [--hidden N] ...``; a line ``losses [...]`` has the losses it read.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from vgpu.marks import mark


class Block(nn.Module):
    """A norm and a gated pair of linear layers, with a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


Step = Callable[[], torch.Tensor]


def plain(options: argparse.Namespace, model: nn.Module, dtype: torch.dtype) -> Step:
    """A step of a model whose strategy is in its wrapper."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, foreach=options.foreach)
    update = torch.compile(optimizer.step) if options.compile_optimizer else optimizer.step

    def step() -> torch.Tensor:
        for left in reversed(range(options.accumulate)):
            inputs = batch(options, dtype)
            with model.no_sync() if options.no_sync and left else nullcontext():
                mark("forward")
                loss = model(inputs).float().pow(2).mean()
                is_later = len(optimizer.state) > 0  # than the first step
                if options.nan and is_later and dist.get_rank():
                    loss = loss * float("nan")
                mark("backward")
                loss.backward()
            mark("other")
        mark("optimizer")
        update()
        mark("other")
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def ddp(options: argparse.Namespace, model: nn.Module) -> Step:
    model.cuda()
    if options.graph:
        model = torch.cuda.make_graphed_callables(model, (batch(options, torch.float32),))
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        device_ids=[torch.cuda.current_device()],
        bucket_cap_mb=options.bucket_mb,
        gradient_as_bucket_view=options.bucket_view,
        find_unused_parameters=options.find_unused,
        static_graph=options.static_graph,
    )
    return plain(options, wrapped, torch.float32)


def fsdp1(options: argparse.Namespace, model: nn.Module) -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=half, use_orig_params=True,
        device_id=torch.cuda.current_device(),
    )  # fmt: skip
    return plain(options, wrapped, torch.bfloat16)


def fsdp2(options: argparse.Namespace, model: nn.Module) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    shape = (2, world // 2) if options.strategy == "hsdp" else (world,)
    names = ("replicate", "shard") if options.strategy == "hsdp" else ("shard",)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {"mp_policy": half, "mesh": mesh, "reshard_after_forward": not options.keep}
    if options.offload:
        settings["offload_policy"] = CPUOffloadPolicy()
    for block in model.children():
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return plain(options, model if options.offload else model.cuda(), torch.bfloat16)


def zero(options: argparse.Namespace, model: nn.Module) -> Step:
    import deepspeed

    stage = int(options.strategy.removeprefix("zero"))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage, "overlap_comm": True, "contiguous_gradients": True,
            "reduce_bucket_size": 20_000_000, "allgather_bucket_size": 20_000_000,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }  # fmt: skip
    if options.offload:  # DeepSpeed's own Adam on the CPU would have to be compiled
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, foreach=stage < 3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> torch.Tensor:
        inputs = batch(options, torch.bfloat16)
        mark("forward")
        loss: torch.Tensor = engine(inputs).float().pow(2).mean()
        mark("backward")
        engine.backward(loss)
        mark("optimizer")
        engine.step()
        mark("other")
        return loss

    return step


def tensor_parallel(options: argparse.Namespace, model: nn.Module) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model.cuda()
    for block in model.children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    options.foreach = False  # which would mix the norms' tensors with those that are sharded
    return plain(options, model, torch.float32)


def pipeline(options: argparse.Namespace, model: nn.Module) -> Step:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()
    blocks = list(model.children())
    share = len(blocks) // world
    part = nn.Sequential(*blocks[rank * share : (rank + 1) * share]).cuda()
    stage = PipelineStage(part, rank, world, torch.device("cuda", device))
    schedule = ScheduleGPipe(stage, 2 * world, loss_fn=lambda out, _: out.float().pow(2).mean())
    optimizer = torch.optim.AdamW(part.parameters(), lr=options.lr, foreach=True)

    def step() -> torch.Tensor:
        x = batch(options, torch.float32, 2 * world)
        mark("forward")
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses) if rank == world - 1 else schedule.step()
        mark("optimizer")
        optimizer.step()
        mark("other")
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean() if losses else torch.zeros((), device="cuda")

    return step


STRATEGIES: dict[str, Callable[[argparse.Namespace, nn.Module], Step]] = {
    "ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2, "hsdp": fsdp2, "zero1": zero, "zero2": zero,
    "zero3": zero, "tp": tensor_parallel, "pp": pipeline,
}  # fmt: skip


def batch(options: argparse.Namespace, dtype: torch.dtype, multiple: int = 1) -> torch.Tensor:
    """The same input each step, so that a loss that falls shows that training works."""
    size = options.batch * multiple
    steps = torch.arange(size * options.hidden, dtype=torch.float32)
    return torch.sin(steps).reshape(size, options.hidden).to(dtype).cuda()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--log", type=int, default=1, help="read the loss every N steps; 0: never")
    parser.add_argument("--bucket-mb", type=float, default=25)
    parser.add_argument("--bucket-view", action="store_true", help="DDP: gradient_as_bucket_view")
    parser.add_argument("--find-unused", action="store_true", help="DDP: find_unused_parameters")
    parser.add_argument("--static-graph", action="store_true", help="DDP: static_graph")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps of a step")
    parser.add_argument("--no-sync", action="store_true", help="DDP: only the last one communicates")
    parser.add_argument("--keep", action="store_true", help="FSDP2: do not reshard after forward")
    parser.add_argument("--nan", action="store_true", help="the loss of all ranks but 0 is NaN")
    parser.add_argument("--barrier", type=int, default=0, help="after N steps, once: rank 1 is late")
    parser.add_argument("--compile", action="store_true", help="the model, by inductor")
    parser.add_argument("--compile-optimizer", action="store_true", help="the same of its step")
    parser.add_argument("--graph", action="store_true", help="DDP: forward and backward as graphs")
    parser.add_argument("--offload", action="store_true", help="optimizer states on the host")
    parser.add_argument("--profile", action="store_true", help="trace the second half of the steps")
    parser.set_defaults(foreach=True)
    options = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if options.strategy.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed()
    else:
        dist.init_process_group(options.backend)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(options.hidden) for _ in range(options.layers)))
    if options.compile:
        model.compile()
    step = STRATEGIES[options.strategy](options, model)
    losses = []
    profiler = torch.profiler.profile() if options.profile else None
    for number in range(options.steps):
        if profiler and number == options.steps // 2:
            torch.cuda.synchronize()
            profiler.start()
        mark(f"step {number}")
        loss = step()
        if options.log and number % options.log == options.log - 1:
            losses.append(round(loss.item(), 6))
        if number + 1 == options.barrier:
            time.sleep(0.5 * dist.get_rank())
            dist.barrier()
    mark(f"step {options.steps}")
    torch.cuda.synchronize()
    if profiler:
        profiler.stop()
        profiler.export_chrome_trace(f"{os.environ['VGPU_DIR']}/trace-{dist.get_rank()}.json")
    print(f"rank {dist.get_rank()} peak {torch.cuda.max_memory_allocated()}", flush=True)
    print(f"rank {dist.get_rank()} losses {json.dumps(losses)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
