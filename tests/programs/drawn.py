"""Trains a small model on the ranks of torchrun, with one fault: `drawn.py --fault KIND ...`.

On CUDA devices where torch sees some, else on CPUs.
Steps take about 70 ms on a slow core. The fault comes with step --step on rank --rank (-1: on all);
then its time is in the file fault.RANK of the folder --marks. The run ends --seconds later.

late_forward, late_backward    sleeps --amount s in each of them
late_between, late_loader    sleeps --amount s before each step, in each batch
hiccup            sleeps --amount s in every 12th step
checkpoint        saves for --amount s in every 20th step, while the others wait in a barrier
stall_all, sleeps sleeps for ever; stall_all: all ranks
stall_loader, stall_workers    the data set never returns a sample, in the loop or in a worker
skipped, extra    does not call an all_reduce that the others call; calls one that they do not
size, operation   reduces fewer elements than the others; broadcasts where they reduce
uneven            has --amount batches more than the others
leak, leak_limited    keeps --amount MiB per step
exception, killed, exit_zero, return_early    leaves by ValueError, SIGKILL, sys.exit(0), return
nan               has a loss that is not a number
python            spends --amount s per step in Python code of this script
slow_start        reads its data for --amount s before it trains
slow_first_step   spends --amount s in its first step
restart_recovers  leaves by ValueError, and trains well after the restart
restart_repeats   leaves by ValueError in each attempt
restart_fails     leaves by ValueError; does not reach the process group after the restart
evaluation, epochs, healthy    is well; evaluates every 30 steps; starts its workers every 30 batches
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from leave import leave
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 192
BATCH = 96
BLOCKS = 6
CLASSES = 16
FOREVER = 3600.0
MAX_SECONDS = 60.0
"""A run without its fault ends then."""
VOTE_STEPS = 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("fault", "strategy", "loading", "marks"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("accumulation", "rank", "step"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("amount", "seconds"):
        parser.add_argument(f"--{name}", type=float, required=True)
    return parser.parse_args()


OPTIONS = parse()
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_CUDA else torch.device("cpu")
BACKEND = "nccl" if ON_CUDA else "gloo"


class SlowFile:
    """A file on a slow disk: all its bytes take so many seconds."""

    def __init__(self, seconds: float, nbytes: int) -> None:
        self._seconds_per_byte = seconds / nbytes

    def write(self, data: Any) -> int:
        time.sleep(len(data) * self._seconds_per_byte)
        return len(data)

    def flush(self) -> None:
        pass


class Fault:
    """What goes wrong on this rank, at each place of the loop that asks."""

    def __init__(self) -> None:
        self.kind = OPTIONS.fault
        self.step = 0
        self.is_here = OPTIONS.rank in (RANK, -1)
        self.has_left = False
        self._is_marked = False
        self._kept: list[torch.Tensor] = []

    @property
    def is_on(self) -> bool:
        """Whether it has come, and is of this rank."""
        return self.is_here and self.step >= OPTIONS.step

    def mark(self) -> None:
        """Writes when the fault came, once."""
        if not self._is_marked:
            self._is_marked = True
            mark = Path(OPTIONS.marks, f"fault.{RANK}")
            if not mark.exists():  # an earlier attempt wrote it
                mark.write_text(str(time.time()))

    def begin_step(self) -> None:
        """Before each step of the optimizer."""
        self.step += 1
        if self.step == OPTIONS.step and self.is_here and self.kind not in ("uneven", "stall_workers"):
            self.mark()
        if self.step == 1 and self.kind == "slow_first_step":
            time.sleep(OPTIONS.amount)
        if self.is_on:
            self._slow_down()
        if self.step == OPTIONS.step:
            self._diverge()
            if self.is_here:
                self._leave()

    def _slow_down(self) -> None:
        if self.kind == "late_between" or (self.kind == "hiccup" and self.step % 12 == 0):
            time.sleep(OPTIONS.amount)
        elif self.kind in ("stall_all", "sleeps"):
            time.sleep(FOREVER)
        elif self.kind in ("leak", "leak_limited"):
            self._kept.append(torch.ones(int(OPTIONS.amount * 2**18), device=DEVICE))
        elif self.kind == "python":
            self._count(time.time() + OPTIONS.amount)

    def _count(self, end: float) -> int:
        total = 0
        while time.time() < end:
            total += sum(range(1000))
        return total

    def _diverge(self) -> None:
        """Collectives of which this rank calls others than the rest, in one step."""
        callers = {"skipped": not self.is_here, "extra": self.is_here}
        if callers.get(self.kind):
            dist.all_reduce(torch.ones(7, device=DEVICE))
        elif self.kind == "size":
            dist.all_reduce(torch.ones(1000 if self.is_here else 4000, device=DEVICE))
        elif self.kind == "operation" and self.is_here:
            dist.broadcast(torch.ones(64, device=DEVICE), RANK)
        elif self.kind == "operation":
            dist.all_reduce(torch.ones(64, device=DEVICE))

    def _leave(self) -> None:
        again = self.kind == "restart_repeats"
        if self.kind == "exception" or again or (ATTEMPT == 0 and self.kind.startswith("restart")):
            raise ValueError(f"label 99 of batch {self.step} is not below {CLASSES}")
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "exit_zero":
            sys.exit(0)
        elif self.kind == "return_early":
            self.has_left = True

    def forward(self, hidden: torch.Tensor) -> None:
        """In the middle of each forward."""
        if self.kind == "late_forward" and self.is_on:
            time.sleep(OPTIONS.amount)
        elif self.kind == "late_backward" and self.is_on and hidden.requires_grad:
            hidden.register_hook(lambda _: time.sleep(OPTIONS.amount))

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that the model returns."""
        return loss * float("nan") if self.kind == "nan" and self.is_on else loss

    def sample(self, count: int) -> None:
        """In the data set, before sample number *count* of this process."""
        if self.kind == "late_loader" and self.is_on and count % BATCH == 0:
            time.sleep(OPTIONS.amount)
        elif self.kind == "stall_loader" and self.is_on:
            time.sleep(FOREVER)
        elif self.kind == "stall_workers" and self.is_here and count == _last_sample():
            self.mark()
            time.sleep(FOREVER)

    def end_step(self, model: nn.Module) -> None:
        """After each step of the optimizer."""
        if self.kind == "checkpoint" and self.step >= OPTIONS.step and self.step % 20 == 0:
            if self.is_here:
                blob = torch.ones(2**20)
                torch.save({"model": blob}, SlowFile(OPTIONS.amount, 2**22))  # type: ignore[arg-type]
            dist.barrier()
        if self.kind == "evaluation" and self.step % 30 == 0:
            evaluate(model)


def _last_sample() -> int:
    """The samples that each of two workers makes until the fault's step."""
    return BATCH * OPTIONS.accumulation * OPTIONS.step // 2


FAULT = Fault()


class Samples(Dataset[Any]):
    """Random samples of this rank."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._count = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        FAULT.sample(self._count)
        self._count += 1
        source = torch.Generator().manual_seed(index * WORLD + RANK)
        return {
            "inputs": torch.randn(WIDTH, generator=source),
            "labels": torch.randint(0, CLASSES, (), generator=source),
        }


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Batches of the rank on its device."""
    for batch in host_batches():
        yield {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def host_batches() -> Iterator[dict[str, torch.Tensor]]:
    """Batches of the rank: of one epoch where that is the fault, else without an end."""
    per_epoch = 10**6
    if FAULT.kind == "uneven":
        per_epoch = OPTIONS.step + (int(OPTIONS.amount) if FAULT.is_here else 0)
    elif FAULT.kind == "epochs":
        per_epoch = 30
    while True:
        if OPTIONS.loading == "none":
            for _ in range(per_epoch):
                yield {
                    "inputs": torch.randn(BATCH, WIDTH),
                    "labels": torch.randint(0, CLASSES, (BATCH,)),
                }
        else:
            workers = 2 if OPTIONS.loading == "workers" else 0
            yield from DataLoader(Samples(per_epoch * BATCH), BATCH, num_workers=workers)
        if FAULT.kind == "uneven":
            return


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))


class Network(nn.Module):
    """Blocks and a loss, called as a Trainer calls a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = inputs.to(self.head.weight.dtype)
        for number, layer in enumerate(self.layers):
            if number == BLOCKS - 2 and self.training:
                FAULT.forward(hidden)
            hidden = layer(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden).float(), labels)
        return {"loss": FAULT.loss(loss)}


def evaluate(model: nn.Module) -> None:
    """Twenty batches without gradients."""
    model.eval()
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn(BATCH, WIDTH).to(DEVICE), torch.randint(0, CLASSES, (BATCH,)).to(DEVICE))
    model.train()


STARTED = time.time()


def is_over(step: int) -> bool:
    """Whether all ranks shall end after *step*; rank 0 decides, and all ask in the same steps."""
    if step % VOTE_STEPS:
        return False
    marks = [float(path.read_text() or "inf") for path in Path(OPTIONS.marks).glob("fault.*")]
    end = min([STARTED + MAX_SECONDS, *(mark + OPTIONS.seconds for mark in marks)])
    if FAULT.kind.startswith("restart"):
        is_last = ATTEMPT and FAULT.kind == "restart_recovers"
        end = STARTED + (OPTIONS.seconds if is_last else FOREVER)
    vote = torch.tensor([float(time.time() > end)], device=DEVICE)
    dist.broadcast(vote, 0)
    return bool(vote.item())


def parallel(model: nn.Module) -> Any:
    """The model under torch's own strategies."""
    if OPTIONS.strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        return fully_shard(model)
    if OPTIONS.strategy == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        wrap = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=wrap, device_id=DEVICE, use_orig_params=True
        )
    if OPTIONS.strategy == "ddp_frozen":
        for layer in model.layers[: BLOCKS // 2]:  # type: ignore[index]
            layer.requires_grad_(False)
    is_static = OPTIONS.strategy == "ddp_static"
    wrapped = nn.parallel.DistributedDataParallel(
        model,
        bucket_cap_mb=2,
        find_unused_parameters=OPTIONS.strategy == "ddp_unused",
        static_graph=is_static,
        gradient_as_bucket_view=is_static,
    )
    if OPTIONS.strategy == "ddp_hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    if OPTIONS.strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def without_sync(model: Any, is_last: bool) -> Any:
    """The context of a micro-step: gradients are reduced in the last one only."""
    if OPTIONS.strategy == "fsdp2":
        model.set_requires_gradient_sync(is_last)
        return nullcontext()
    return nullcontext() if is_last else model.no_sync()


def train_torch() -> None:
    """A plain loop over DDP, ZeroRedundancyOptimizer, FSDP1 or FSDP2."""
    model = parallel(Network().to(DEVICE))
    optimizer = optimizer_of(model)
    source = batches()
    while True:
        FAULT.begin_step()
        if FAULT.has_left:
            return
        for micro in range(OPTIONS.accumulation):
            batch = next(source, None)
            if batch is None:
                FAULT.mark()
                dist.barrier()
                return
            with without_sync(model, micro == OPTIONS.accumulation - 1):
                loss = model(**batch)["loss"] / OPTIONS.accumulation
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        FAULT.end_step(model)
        if is_over(FAULT.step):
            return


def train_deepspeed() -> None:
    """The same with an engine of DeepSpeed, ZeRO-2 or ZeRO-3."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH, "bf16": {"enabled": True},
        "gradient_accumulation_steps": OPTIONS.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": int(OPTIONS.strategy[-1])},
        "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    }  # fmt: skip
    network = Network()
    engine = deepspeed.initialize(model=network, model_parameters=network.parameters(), config=config)[0]
    source = batches()
    while True:
        FAULT.begin_step()
        if FAULT.has_left:
            return
        for _ in range(OPTIONS.accumulation):
            batch = next(source, None)
            if batch is None:
                FAULT.mark()
                dist.barrier()
                return
            engine.backward(engine(**batch)["loss"])
            engine.step()
        FAULT.end_step(engine)
        if is_over(FAULT.step):
            return


def train_trainer() -> None:
    """The same with HF Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_begin(self, arguments: Any, state: Any, control: Any, **more: Any) -> None:
            FAULT.begin_step()

        def on_step_end(self, arguments: Any, state: Any, control: Any, **more: Any) -> None:
            FAULT.end_step(more["model"])
            control.should_training_stop = FAULT.has_left or is_over(FAULT.step)

    arguments = TrainingArguments(
        str(Path(OPTIONS.marks) / "trainer"),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=OPTIONS.accumulation,
        dataloader_num_workers=2 if OPTIONS.loading == "workers" else 0,
        max_steps=10**6, logging_steps=20, save_strategy="no", report_to=[],
        use_cpu=not ON_CUDA, disable_tqdm=True, ddp_backend=BACKEND,
    )  # fmt: skip
    Trainer(Network(), arguments, train_dataset=Samples(10**6), callbacks=[Steps()]).train()


def join() -> None:
    """Joins the process group, or fails to."""
    if FAULT.kind == "restart_fails" and ATTEMPT and FAULT.is_here:
        os.environ.update(MASTER_PORT="9", TORCHELASTIC_USE_AGENT_STORE="False")  # nobody is there
        dist.init_process_group(BACKEND, timeout=timedelta(seconds=3))
    elif ATTEMPT:
        # gloo would read the addresses of the attempt before and wait for ranks that have ended
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, WORLD, is_master=False)
        own = dist.PrefixStore(f"attempt-{ATTEMPT}", store)
        dist.init_process_group(BACKEND, store=own, rank=RANK, world_size=WORLD)
    elif OPTIONS.strategy in ("zero2", "zero3"):
        import deepspeed

        deepspeed.init_distributed(BACKEND)
    elif OPTIONS.strategy != "trainer":
        dist.init_process_group(BACKEND)


def main() -> None:
    torch.manual_seed(RANK)
    if ON_CUDA:
        torch.cuda.set_device(DEVICE)
    join()
    if FAULT.kind == "slow_start":
        FAULT.mark()
        time.sleep(OPTIONS.amount)
    if OPTIONS.strategy == "trainer":
        train_trainer()
    elif OPTIONS.strategy in ("zero2", "zero3"):
        train_deepspeed()
    else:
        train_torch()
    dist.destroy_process_group()
    print(f"rank {RANK} trained {FAULT.step} steps", flush=True)
    leave()


if __name__ == "__main__":
    main()
