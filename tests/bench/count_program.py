"""Trains nine units and counts what its steps do, with the agent and after it was stopped; run by
bench_counts.py, which says what each counter is. With ``TIMED`` it times the first 100 steps and that
many more; for that it also trains under Hugging Face's Trainer, with its defaults. Where there is a
CUDA device, it trains there.

The steps that are counted are those of a long run: they have the numbers from 1,000 on, so that one in
65 is a control step, one takes a census, and seven are detailed. What the agent does every 100 ms it
does here every second step, as if one took 50 ms: valgrind makes them longer.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

LAYERS, WARM_UP, WINDOW, WITHOUT, FROM, FIRST = 8, 12, 65, 10, 1000, 100


class Block(torch.nn.Module):
    """A layer with a norm and two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


class WithLoss(torch.nn.Module):
    """A model as Hugging Face's Trainer expects it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(x).square().mean()}


def sequence(width: int) -> torch.nn.Sequential:
    """The model, on this rank's device."""
    torch.manual_seed(0)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    return torch.nn.Sequential(*(Block(width) for _ in range(LAYERS))).to(device)


def train_with_trainer(width: int, batch: int, steps: int, after_step: Callable[[], None]) -> None:
    """Trains under Hugging Face's Trainer, which reads its batches from a DataLoader."""
    transformers = importlib.import_module("transformers")

    class AfterStep(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            after_step()

    arguments = transformers.TrainingArguments(
        output_dir=os.environ["TRAINER_OUTPUT"], max_steps=steps, per_device_train_batch_size=batch,
        save_strategy="no", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    data = [{"x": row} for row in torch.randn(4 * batch, width)]
    model = WithLoss(sequence(width))
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[AfterStep()]).train()


def stepper(strategy: str, width: int, batch: int) -> Callable[[], None]:
    """Returns a function that takes one step."""
    model: Any = sequence(width)
    x = torch.randn(batch, width, device=next(model.parameters()).device)
    if strategy in ("zero2", "zero3"):
        deepspeed = importlib.import_module("deepspeed")
        config = {
            "train_micro_batch_size_per_gpu": batch,
            "zero_optimization": {"stage": int(strategy[-1]), "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)

        def step_engine() -> None:
            engine.backward(engine(x).square().mean())
            engine.step()

        return step_engine
    fsdp = importlib.import_module("torch.distributed.fsdp")
    if strategy == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif strategy == "fsdp1":
        policy = importlib.import_module("torch.distributed.fsdp.wrap").ModuleWrapPolicy({Block})
        place = model[0].norm.weight.device
        model = fsdp.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=place, use_orig_params=True
        )
    else:
        for block in model:
            fsdp.fully_shard(block)
        fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Calls:
    """Python functions that this thread enters."""

    def __init__(self) -> None:
        self.count = 0

    def _note(self, _: Any, event: str, __: Any) -> None:
        self.count += event == "call"

    def begin(self) -> None:
        """Counts from now on."""
        self.count = 0
        sys.setprofile(self._note)

    def end(self) -> None:
        """Stops counting."""
        sys.setprofile(None)

    cancel = end


class Callgrind:
    """What valgrind counts, into a file for each window."""

    def __init__(self, library: str) -> None:
        self._requests = ctypes.PyDLL(library)

    def begin(self) -> None:
        """Counts from now on."""
        self._requests.zero()
        self._requests.start()

    def end(self) -> None:
        """Stops counting, and writes the counts."""
        self._requests.dump()
        self._requests.stop()

    def cancel(self) -> None:
        """Stops counting, and writes nothing."""
        self._requests.stop()


class Times:
    """Prints wall time and CPU time of this rank, in nanoseconds: of the start, and of a step then.

    Of the start they are those from the command to the end of the first step.
    """

    def __init__(self, steps: int) -> None:
        self.last = FIRST + steps
        self.count = self.since = self.wall = self.cpu = 0

    def after_step(self) -> None:
        """Called when a step has ended."""
        self.count += 1
        if self.count not in (1, FIRST, self.last):
            return
        if self.count == 1:
            wall, cpu = time.time_ns() - int(os.environ["BEGAN"]), time.process_time_ns()
            steps = 1
        else:
            dist.barrier()
            wall, cpu = time.perf_counter_ns() - self.wall, time.process_time_ns() - self.cpu
            steps = self.count - self.since
        os.write(1, f"\nTIMED {wall / steps} {cpu / steps}\n".encode())  # at once: both print
        dist.barrier()
        self.since, self.wall, self.cpu = self.count, time.perf_counter_ns(), time.process_time_ns()


def time_steps(strategy: str, width: int, batch: int, steps: int) -> None:
    """Trains the first 100 steps and *steps* more, and prints what they take."""
    times = Times(steps)
    if strategy == "trainer":
        train_with_trainer(width, batch, times.last, times.after_step)
        return
    step = stepper(strategy, width, batch)
    for _ in range(times.last):
        step()
        times.after_step()


def repeat_after(interval_ns: int) -> None:
    """Makes the agent do after *interval_ns* what it does every 100 ms."""
    for module, name in (("runtime.agent", "_LOOKS_EVERY_NS"), ("observe.allocator", "_EVERY_NS")):
        owner = importlib.import_module(f"zeromon_agents.{module}")
        assert getattr(owner, name) == 100_000_000
        setattr(owner, name, interval_ns)


def main() -> None:
    """Takes the steps; prints the counts of rank 0."""
    strategy, width, batch, without = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if "TIMED" in os.environ:
        time_steps(strategy, width, batch, int(os.environ["TIMED"]))
        dist.destroy_process_group()
        return
    step, library = stepper(strategy, width, batch), os.environ.get("REQUESTS", "")
    counter = Callgrind(library) if library else Calls()
    found: dict[str, float] = {}
    for _ in range(WARM_UP):
        step()
    if "ZEROMON_RUN_DIR" in os.environ:
        agents = importlib.import_module("zeromon_agents")
        agent = importlib.import_module("zeromon_agents.runtime.bootstrap").BOOTSTRAP.agent
        agent.context.step = FROM - 2
        agent.collectives.end_warm_up()
        counter.begin()
        began_ns = time.monotonic_ns()
        for _ in range(2):
            step()
        repeat_after(time.monotonic_ns() - began_ns)
        counter.cancel()
        gc.collect()
        gc.freeze()  # one collection of all objects more or less would be a tenth of the count
        following = agent.ring.slots.following
        first = following()
        counter.begin()
        for _ in range(WINDOW):
            step()
        counter.end()
        found |= {"records": (following() - first - 1) / WINDOW, "errors": agent.guard.errors}
        if not library:
            found["with"] = counter.count / WINDOW
        dist.barrier()
        agents.stop()
        for _ in range(WARM_UP):
            step()
    counter.begin()
    for _ in range(without):
        step()
    counter.end()
    if not library:
        found["without"] = counter.count / without
    if dist.get_rank() == 0:
        print("COUNTS " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
