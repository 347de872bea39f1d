"""Trains on CUDA with one planned fault: `device_job.py CASE`, a rank of the case in cases.json.

Steps and phases are marked on the device's timeline, from which the truth is read afterwards. Each rank
writes RANK.json into the folder TRUTH: what the timeline does not have. The lines that a monitor asks
for come from its file in monitors/.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from monitor import monitor_lines
from torch import nn
from torch.utils.data import DataLoader, Dataset
from vgpu.marks import mark

HERE = Path(__file__).resolve().parent
FOLDER = Path(os.environ["TRUTH"])
NAME = sys.argv[1]
CASE: dict[str, Any] = json.loads((HERE / "cases.json").read_text())["virtual"][NAME]
SETTINGS: dict[str, Any] = CASE["settings"]
FAULT: dict[str, Any] = CASE.get("fault", {})
STRATEGY, STEPS = CASE["strategy"], CASE["steps"]
RANK = int(os.environ["RANK"])
HIDDEN, LAYERS, BATCH = SETTINGS["hidden"], SETTINGS["layers"], SETTINGS["batch"]
LOG_EVERY = 10
lines = monitor_lines()
host_marks: list[dict[str, float]] = []
kept: list[torch.Tensor] = []


def has_fault(kind: str) -> bool:
    """Whether the fault of the case is of this kind, and this rank has it."""
    return FAULT.get("kind") == kind and FAULT.get("rank", RANK) == RANK


class Samples(Dataset[torch.Tensor]):
    """Batches; the fault `input` lets each one take some time, `uneven` makes some of them longer."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(CASE["seed"] + RANK)
        self.row = torch.ones(HIDDEN)

    def __len__(self) -> int:
        return STEPS - FAULT.get("fewer_batches", 0) * has_fault("leaves")

    def __getitem__(self, at: int) -> torch.Tensor:
        if has_fault("input"):
            time.sleep(FAULT["seconds"])
        rows = BATCH
        if has_fault("uneven"):
            rows *= int(torch.randint(1, FAULT["longest"] + 1, (), generator=self.random))
        return self.row.expand(rows, HIDDEN).contiguous().pin_memory()


class Block(nn.Module):
    """A norm and a pair of linear layers, with a residual; `spare` has no part in the loss."""

    def __init__(self, has_spare: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.spare = nn.Linear(HIDDEN, HIDDEN) if has_spare else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Sequential):
    """A stack of blocks."""

    def __init__(self) -> None:
        super().__init__(*(Block(STRATEGY == "ddp-unused") for _ in range(LAYERS)))


# ---- strategies -----------------------------------------------------------------------------------


class Plain:
    """A model whose strategy is in its wrapper, and its optimizer."""

    dtype = torch.float32

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def backward(self, loss: torch.Tensor) -> None:
        """The gradients."""
        loss.backward()

    def update(self) -> None:
        """The step of the optimizer, and no gradients any more."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def ddp(model: nn.Module) -> Plain:
    return Plain(
        nn.parallel.DistributedDataParallel(
            model.cuda(),
            bucket_cap_mb=SETTINGS.get("bucket_mb", 25),
            find_unused_parameters=STRATEGY == "ddp-unused",
        )
    )


def fsdp1(model: nn.Module) -> Plain:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = None if SETTINGS.get("one_unit") else ModuleWrapPolicy({Block})
    return Plain(
        FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.cuda.current_device()
        )
    )


def fsdp2(model: nn.Module) -> Plain:
    from torch.distributed.fsdp import fully_shard

    model.cuda()
    if not SETTINGS.get("one_unit"):
        for block in model.children():
            fully_shard(block)
    return Plain(fully_shard(model))


class Engine(Plain):
    """DeepSpeed's engine."""

    dtype = torch.bfloat16

    def __init__(self, model: nn.Module) -> None:
        import deepspeed

        stage = int(STRATEGY.removeprefix("zero"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=stage < 3)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, **SETTINGS["zero"]},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            **lines.deepspeed_settings(),
        }
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()


WRAPPERS: dict[str, Callable[[nn.Module], Plain]] = {
    "ddp": ddp, "ddp-unused": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2, "zero2": Engine, "zero3": Engine,
}  # fmt: skip


# ---- faults ---------------------------------------------------------------------------------------


class SlowFile(io.BytesIO):
    """A file of a slow file system."""

    def write(self, content: Any) -> int:
        time.sleep(memoryview(content).nbytes / FAULT["bytes_per_second"])
        return super().write(content)


def stand_still() -> None:
    """Goes no further."""
    time.sleep(3600)


def keep() -> None:
    """Device memory that no step gives back."""
    kept.append(torch.empty(FAULT["bytes"], dtype=torch.uint8, device="cuda"))


def large_batch() -> None:
    """Activations that do not fit on the device."""
    kept.append(torch.empty(FAULT["bytes"], dtype=torch.uint8, device="cuda"))


def save(model: nn.Module) -> None:
    """A checkpoint to a slow file system."""
    with SlowFile() as file:
        torch.save(model.state_dict(), file)


def strike(step: int, model: nn.Module) -> None:
    """The fault of this step."""
    if has_fault("leak"):
        keep()
    if step != FAULT.get("at_step"):
        return
    if has_fault(FAULT["kind"]):
        write_file("struck", str(time.time()))
    if has_fault("hang"):
        stand_still()
    if has_fault("oom"):
        large_batch()
    if has_fault("checkpoint"):
        save(model)


# ---- training -------------------------------------------------------------------------------------


def train(wrapped: Plain) -> None:
    """Steps with marks; the host reads the loss in each tenth one, and so runs ahead."""
    model, batches = wrapped.model, iter(DataLoader(Samples(), batch_size=None))
    for step in range(len(Samples())):
        with lines.each_step(model):
            mark(f"step {step}")
            began = time.monotonic()
            strike(step, model)
            struck = time.monotonic()
            batch = next(batches)
            loaded = time.monotonic()
            inputs = batch.to("cuda", non_blocking=True).to(wrapped.dtype)
            mark("forward")
            loss = model(inputs).float().square().mean()
            mark("backward")
            wrapped.backward(loss)
            mark("optimizer")
            wrapped.update()
            mark("other")
            if step % LOG_EVERY == LOG_EVERY - 1:
                loss.item()
        host_marks.append({"start": began, "fault": struck - began, "data": loaded - struck})
    mark(f"step {STEPS}")
    torch.cuda.synchronize()


def start() -> None:
    """The process group, the seed, and what the monitor wants before the model."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if STRATEGY.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed()
    else:
        dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(CASE["seed"])
    write_file(f"{RANK}.pid", str(os.getpid()))
    lines.begin()


def begin_training() -> float:
    """Seconds of the epoch; a fault of no certain step is there from now on."""
    started = time.time()
    if "at_step" not in FAULT and FAULT.get("kind") != "leaves":
        write_file("struck", str(started))
    return started


def finish(started: float) -> None:
    """What the timeline does not have, and the end once the monitor has seen it."""
    lines.end()
    free, total = torch.cuda.mem_get_info()
    facts = {
        "started": started, "ended": time.time(), "marks": host_marks,
        "peak": torch.cuda.max_memory_allocated(), "device_used": total - free,
    }  # fmt: skip
    write_file(f"{RANK}.json", json.dumps(facts))
    if has_fault("leaves"):
        write_file("struck", str(time.time()))
        os._exit(0)
    limit = time.monotonic() + float(os.environ.get("TRUTH_WAITS", "0"))
    while time.monotonic() < limit and not (FOLDER / "seen").exists():
        time.sleep(0.05)
    dist.barrier()
    dist.destroy_process_group()


def write_file(name: str, content: str) -> None:
    """A file that is there as a whole, or not."""
    unfinished = FOLDER / f"{name}.{RANK}.part"
    unfinished.write_text(content)
    unfinished.rename(FOLDER / name)


def main() -> None:
    start()
    wrapped = WRAPPERS[STRATEGY](Net())
    started = begin_training()
    train(wrapped)
    finish(started)


if __name__ == "__main__":
    main()
