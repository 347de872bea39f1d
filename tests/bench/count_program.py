"""Trains nine units and counts what its steps do, with the agent and after it was stopped; run by
bench_counts.py, which says what each counter is. With ``TIMED`` it times the first 100 steps and that
many more. Where there is a
CUDA device, it trains there.

The steps that are counted are those of a long run: they have the numbers from 1,000 on, so that one in
65 is a control step, one takes a census, and seven are detailed.
"""

from __future__ import annotations

import ctypes
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


def stepper(strategy: str, width: int, batch: int) -> Callable[[], None]:
    """Returns a function that takes one step."""
    torch.manual_seed(0)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    model: Any = torch.nn.Sequential(*(Block(width) for _ in range(LAYERS))).to(device)
    x = torch.randn(batch, width, device=device)
    if strategy == "zero3":
        deepspeed = importlib.import_module("deepspeed")
        config = {
            "train_micro_batch_size_per_gpu": batch,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)

        def step_engine() -> None:
            engine.backward(engine(x).square().mean())
            engine.step()

        return step_engine
    if strategy == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        fsdp = importlib.import_module("torch.distributed.fsdp")
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


class Callgrind:
    """What valgrind counts, into a file for each window."""

    def __init__(self, library: str) -> None:
        self._requests = ctypes.PyDLL(library)

    def begin(self) -> None:
        """Counts from now on."""
        self._requests.start()

    def end(self) -> None:
        """Stops counting, and writes the counts."""
        self._requests.dump()
        self._requests.stop()


def time_steps(step: Callable[[], None], steps: int) -> None:
    """Prints wall time and CPU time of this rank, in nanoseconds: of the start, and of a step then.

    Of the start they are those from the command to the end of the first step.
    """
    step()
    since_command = time.time_ns() - int(os.environ["BEGAN"])
    os.write(1, f"TIMED {since_command} {time.process_time_ns()}\n".encode())  # at once: both print
    for count in (FIRST - 1, steps):
        dist.barrier()
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(count):
            step()
        dist.barrier()
        wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        os.write(1, f"TIMED {wall / count} {cpu / count}\n".encode())


def main() -> None:
    """Takes the steps; prints the counts of rank 0."""
    strategy, width, batch, without = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    step, library = stepper(strategy, width, batch), os.environ.get("REQUESTS", "")
    counter = Callgrind(library) if library else Calls()
    found: dict[str, float] = {}
    if "TIMED" in os.environ:
        time_steps(step, int(os.environ["TIMED"]))
        dist.destroy_process_group()
        return
    for _ in range(WARM_UP):
        step()
    if "ZEROMON_RUN_DIR" in os.environ:
        agents = importlib.import_module("zeromon_agents")
        agent = importlib.import_module("zeromon_agents.runtime.bootstrap").BOOTSTRAP.agent
        agent.context.step = FROM - 2
        agent.collectives.end_warm_up()
        for _ in range(2):
            step()
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
