"""Two ranks with a problem that zeromon knows a remedy for: `advised.py CASE before|after [STEPS]`.

`after` is `before` with the finding's diff applied, and nothing else.
"""

import contextlib
import gc
import shutil
import sys
import tempfile
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from leave import leave
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

CASE, AFTER = sys.argv[1], sys.argv[2] == "after"
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 60
MICRO = 4
WIDTH, LAYERS, BATCH = 512, 8, 256


class Slow(torch.utils.data.Dataset):
    """A batch takes 30 ms to make."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.03)
        return torch.ones(BATCH, WIDTH)


def layers(width: int = WIDTH, count: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def sharded(model: nn.Sequential, **options: Any) -> Any:
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(model: Any, batches: Any, micro: int = 1, sync: Any = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for batch in batches:
        for number in range(micro):
            last = number == micro - 1
            with sync(model, last) if sync else contextlib.nullcontext():
                model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(width: int = WIDTH, batch: int = BATCH) -> Any:
    return (torch.ones(batch, width) for _ in range(STEPS))


def fsdp_prefetch_off() -> None:
    model = layers()
    sharded(model)
    if AFTER:
        model._set_unshard_async_op(True)
        for this, following in zip(model, list(model)[1:], strict=False):
            this.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([this])
    train(model, same())


def reshard_without_need() -> None:
    model = layers()
    sharded(model, **({"reshard_after_forward": False} if AFTER else {}))
    train(model, same())


def whole_model_unit() -> None:
    model = layers()
    train(sharded(model) if AFTER else fully_shard(model), same())


def ddp_bucket_large() -> None:
    train(DistributedDataParallel(layers(), bucket_cap_mb=1 if AFTER else 25), same())


def tiny_collectives() -> None:
    model = layers(48, 60)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=25 if AFTER else 0.001)
    train(wrapped, same(48, 16))


def tiny_units() -> None:
    model = layers(48, 40)
    groups = [model[i : i + 10] for i in range(0, 40, 10)]
    whole = nn.Sequential(*groups)
    for part in groups if AFTER else model:
        fully_shard(part)
    train(fully_shard(whole), same(48, 16))


def accumulation_communicates() -> None:
    def sync(model: Any, last: bool) -> Any:
        return contextlib.nullcontext() if last else model.no_sync()

    train(DistributedDataParallel(layers()), same(), MICRO, sync if AFTER else None)


def accumulation_fsdp() -> None:
    def sync(model: Any, last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    train(sharded(layers()), same(), MICRO, sync if AFTER else None)


def data_wait() -> None:
    options: Any = {"num_workers": 4, "persistent_workers": True} if AFTER else {"num_workers": 0}
    loader = torch.utils.data.DataLoader(Slow(), batch_size=None, **options)
    train(DistributedDataParallel(layers()), loader)


def epoch_workers() -> None:
    """Workers that take a while to start, at each of some short epochs."""
    options: Any = {"persistent_workers": True} if AFTER else {}

    def starts(_: int) -> None:
        time.sleep(0.8)

    data = torch.ones(20, BATCH, WIDTH)
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=1, worker_init_fn=starts, **options
    )
    train(DistributedDataParallel(layers()), (batch for _ in range(STEPS // 20) for batch in loader))


class Node:
    """A part of a reference cycle, as caches and graphs of Python objects have them."""

    def __init__(self) -> None:
        self.itself = self


def garbage_collection() -> None:
    """Many objects live, and a loop that makes cycles: each rank collects when it comes to it."""
    live = [[Node()] for _ in range(300_000)]
    gc.collect()
    if AFTER:
        gc.freeze()
        gc.disable()

    def batches() -> Any:
        cycles: deque[list[Node]] = deque(maxlen=5)
        for step, batch in enumerate(same()):
            cycles.append([Node() for _ in range(10_000)])
            if AFTER and step % 100 == 0:
                gc.collect(1)
            yield batch
        assert cycles and live

    train(DistributedDataParallel(layers()), batches())


def recompilations() -> None:
    """A length that varies, under a compile that makes a graph for each."""
    torch._dynamo.config.recompile_limit = 1000
    model = DistributedDataParallel(layers(64, 3))
    compiled = torch.compile(model, backend="aot_eager", dynamic=None if AFTER else False)

    def batches() -> Any:
        for step in range(STEPS):
            batch = torch.ones(16 + step % 40, 64)
            if AFTER:
                torch._dynamo.mark_dynamic(batch, 0)
            yield batch

    train(compiled, batches())


def blocking_saves() -> None:
    """A checkpoint every 8 steps, to a file system that needs 0.3 s for it."""
    import torch.distributed.checkpoint as dcp

    class SlowDisk(dcp.FileSystemWriter):
        def write_data(self, *arguments: Any) -> Any:
            time.sleep(0.3)
            return super().write_data(*arguments)

    model = DistributedDataParallel(layers())
    state = {"model": model.state_dict()}
    savers = dist.new_group(backend="gloo")
    folder = tempfile.mkdtemp() if dist.get_rank() == 0 else ""

    def batches() -> Any:
        written: Any = None
        for step, batch in enumerate(same(), 1):
            yield batch
            if step % 8 == 0:
                how: Any = {"storage_writer": SlowDisk(place[0]), "process_group": savers}
                if AFTER:
                    if written is not None:
                        written.result()
                    written = dcp.async_save(state, **how)
                else:
                    dcp.save(state, **how)
        if written is not None:
            written.result()

    place = [folder]
    dist.broadcast_object_list(place)
    train(model, batches())
    dist.barrier()
    if folder:
        shutil.rmtree(folder)


def engine(model: nn.Module, **config: Any) -> Any:
    import deepspeed

    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 1e-6),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_allow_untested_optimizer": True,
            **config,
        },
    )
    return made


def run_engine(made: Any, width: int = WIDTH, batch: int = BATCH, scale: float = 1e-6) -> None:
    half = next(made.module.parameters()).dtype
    for _ in range(STEPS):
        made.backward(made(torch.ones(batch, width, dtype=half)).float().sum() * scale)
        made.step()


def stage_too_high() -> None:
    zero = {"stage": 2 if AFTER else 3, "stage3_param_persistence_threshold": 0}
    run_engine(engine(layers(), zero_optimization=zero))


def tiny_buckets() -> None:
    size = 500_000_000 if AFTER else 2_500
    zero = {"stage": 2, "reduce_bucket_size": size, "allgather_bucket_size": 500_000_000}
    run_engine(engine(layers(48, 40), zero_optimization=zero), 48, 16)


def run_fp16(made_of: dict[str, int]) -> None:
    """2^20 is the largest loss scale that these gradients stand."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # it is, only slow
    half = {"enabled": True, **made_of}
    zero = {"stage": 2, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    run_engine(engine(layers(64, 3), zero_optimization=zero, fp16=half), 64, 16, 1e-3)


def overflow_storm() -> None:
    run_fp16({"initial_scale_power": 16 if AFTER else 50, "hysteresis": 1})


def loss_scale_settings() -> None:
    run_fp16({"initial_scale_power": 20, "loss_scale_window": 1000 if AFTER else 10})


DEEPSPEED = (stage_too_high, tiny_buckets, overflow_storm, loss_scale_settings)
if globals()[CASE] in DEEPSPEED:
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo")
else:
    dist.init_process_group("gloo")
globals()[CASE]()
dist.destroy_process_group()
leave()
