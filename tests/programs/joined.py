"""Ranks that train until they are told to stop, and never heard of zeromon: `joined.py KIND OUT [HANG]`.

KIND is fsdp2, ddp, zero3, zero2, plain (one process, no group). OUT gets, by rank, the losses
(exactly), when each step ended and how long it took, at the end what of torch is not as it was at the
beginning, and the losses of as many steps taken again, alone. OUT/stop holds the number of the last
step. At step HANG rank 1 sleeps instead.
"""

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

KIND, OUT = sys.argv[1], Path(sys.argv[2])
HANG = int(sys.argv[3]) if len(sys.argv) > 3 else -1
WIDTH = int(os.environ.get("WIDTH", "64"))
PAUSE = float(os.environ.get("PAUSE", "0.04"))
AGAIN = os.environ.get("AGAIN", "1") == "1"

WATCHED = (
    ("torch._C._distributed_c10d", "ProcessGroup"),
    ("torch._C._distributed_c10d", "Work"),
    ("torch.distributed.distributed_c10d", ""),
    ("torch.autograd", ""),
    ("torch.autograd.profiler", "profile"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup"),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"),
    ("torch.distributed.fsdp._runtime_utils", ""),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("torch.optim.optimizer", ""),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    ("deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator"),
)


def what_is_patched() -> dict[str, object]:
    """Everything that a hook may have replaced, by name."""
    found: dict[str, object] = {"excepthook": id(sys.excepthook), "finders": len(sys.meta_path)}
    found["switch interval"] = sys.getswitchinterval()
    for module, name in WATCHED:
        if module in sys.modules:
            owner = getattr(sys.modules[module], name) if name else sys.modules[module]
            for key, value in list(vars(owner).items()):
                if callable(value):
                    found[f"{module}.{name}.{key}"] = id(value)
    optimizers = sys.modules["torch.optim.optimizer"]
    found["global hooks"] = len(optimizers._global_optimizer_pre_hooks) + len(
        optimizers._global_optimizer_post_hooks
    )
    found["threads"] = sorted(t.name for t in threading.enumerate() if "zeromon" in t.name)
    return found


def marked() -> int:
    """Objects that carry something of zeromon's."""
    return sum(
        1
        for o in gc.get_objects()
        if type(o).__name__ in ("FSDPParamGroup", "FlatParamHandle") and "_zeromon_unit" in vars(o)
    )


def build() -> tuple[object, object]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    if KIND == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    elif KIND == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif KIND.startswith("zero"):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": int(KIND[-1])},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        return engine, None
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def train(rank: int, steps: int = 0) -> dict[str, list]:
    """Trains *steps*, or else until it is told to stop, and writes down what a step gave and took."""
    model, optimizer = build()
    before: dict[str, object] = {}
    losses, ends, spent = [], [], []
    step, last = 0, steps or -1
    stop = OUT / "stop"
    while last < 0 or step < last:
        if not steps:
            time.sleep(PAUSE)  # other tests need the CPUs, and all steps are taken again
        began = time.monotonic()
        step += 1
        if step == 3:  # frameworks have done to themselves what they do in their first step
            before = what_is_patched()
        if step == HANG and rank == 1:
            time.sleep(3600)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = model(torch.randn(4, WIDTH, generator=generator)).pow(2).mean()
        if optimizer is None:
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
        ends.append(time.monotonic())
        spent.append(ends[-1] - began)
        if rank == 0 and not steps and step % 10 == 0:
            (OUT / "step").write_text(str(step))
        if step % 5 == 0 and last < 0 and stop.exists():
            last = int(stop.read_text())
    after = what_is_patched()
    changed = [name for name in before if before[name] != after.get(name)]
    return {"losses": losses, "ends": ends, "spent": spent, "changed": changed}


def main() -> None:
    if KIND != "plain":
        dist.init_process_group("gloo")
    rank = dist.get_rank() if KIND != "plain" else 0
    facts = train(rank)
    found = {
        **facts,
        "marked": marked(),
        "loaded": "zeromon_agents" in sys.modules,
        "main": threading.main_thread() is threading.current_thread(),
        # alone: nobody is attached now
        "again": train(rank, len(facts["losses"]))["losses"] if AGAIN else [],
    }
    (OUT / f"{rank}.json").write_text(json.dumps(found))
    if KIND != "plain":
        dist.barrier()


if __name__ == "__main__":
    main()
    from leave import leave

    leave()
