"""Training in which each step is a random program of streams and collectives: ``steps.py COUNT SEED``.

A tiny model makes the phases. Both ranks draw the same program, each with lengths of its own.
Marks on the timeline say, on each stream, between which two moments a call of the program was enqueued.
A call that may wait for a collective is one of three:

- ``collective``: its stream waits for a collective, or runs it itself
- ``stream TARGET:CALLS``: its stream waits for another one, which had enqueued so many of these calls
- ``host TARGET:CALLS...``: the host waits for these streams, and enqueues nothing meanwhile
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from vgpu.marks import mark

SIDES, GROUPS, EVENTS = 3, 3, 3
CYCLES_PER_US = 1980
SIZES = (256, 1024, 2048, 4096)
ELEMENTS = (1 << 8, 1 << 14, 1 << 18)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "exchange")
MOST_WORKS = 12
FORWARD, BACKWARD, OTHER, OPTIMIZER = range(4)
Action = tuple[Any, ...]


def draw_action(draw: random.Random, sides: int, communicates: bool) -> list[Action]:
    """One action, or a prefetch of several."""
    stream = draw.choice([0, 0, draw.randint(1, sides)])
    kinds = ["sleep"] * 4 + ["multiply"] * 2 + ["wait_stream"] * 2
    kinds += ["record", "wait_event", "pause", "pause"]
    kinds += draw.choices(["synchronize", "item", "host_stream", "host_event"], k=1)
    if communicates:
        kinds += ["issue"] * 5 + ["wait"] * 4 + ["prefetch"] * 2 + ["barrier"]
    kind = draw.choice(kinds)
    if kind == "issue":
        return [(kind, stream, *draw_collective(draw), draw.random() < 0.7)]
    if kind == "wait":
        return [(kind, stream, draw.random())]
    if kind == "wait_stream":
        other = draw.choice([one for one in range(sides + 1) if one != stream])
        return [(kind, stream, other)]
    if kind in ("record", "wait_event", "host_event"):
        return [(kind, stream, draw.randrange(EVENTS))]
    if kind == "prefetch":
        return draw_prefetch(draw, sides)
    return [(kind, stream)]


def draw_prefetch(draw: random.Random, sides: int) -> list[Action]:
    """Side streams gather and copy, and the compute stream, another side or the host needs it."""
    used, actions = draw.sample(range(1, sides + 1), min(sides, draw.randint(1, 2))), []
    last, chained = used[-1], draw.random() < 0.5
    if len(used) > 1 and chained:
        used.pop()
        actions += [("sleep", last)] * draw.randint(0, 3)
    for _ in range(draw.randint(1, 3)):
        for side in used:
            actions += [("issue", side, *draw_collective(draw), True), ("wait", side, 1.0)]
            actions += [("sleep", draw.choice([0, side]))] * draw.randint(0, 2)
    if last not in used:
        return [*actions, ("wait_stream", last, used[0]), ("wait_stream", 0, last)]
    needs: list[Action] = [("wait_stream", 0, side) for side in used]
    return [*actions, *draw.choice([needs, needs, [("synchronize", 0)]])]


def draw_collective(draw: random.Random) -> tuple[str, int, int]:
    return draw.choice(COLLECTIVES), draw.randrange(GROUPS), draw.choice(ELEMENTS)


def draw_step(draw: random.Random) -> list[list[list[Action]]]:
    """The actions of each phase of each micro-step."""
    sides, communicates = draw.randint(1, SIDES), draw.random() < 0.9
    drawn = []
    for _ in range(draw.choice([1, 1, 1, 2])):
        counts = draw.randint(0, 8), draw.randint(0, 4), draw.randint(0, 3), draw.randint(0, 3)
        phases = [
            [one for _ in range(count) for one in draw_action(draw, sides, communicates)]
            for count in counts
        ]
        drawn.append(phases)
    return drawn


class Program:
    """Runs actions by their names."""

    def __init__(self, own: random.Random) -> None:
        self.own = own
        self.streams = [torch.cuda.current_stream()]
        self.streams += [torch.cuda.Stream() for _ in range(SIDES)]
        self.groups = [dist.group.WORLD, *(dist.new_group() for _ in range(GROUPS - 1))]
        self.events = [torch.cuda.Event() for _ in range(EVENTS)]
        self.calls = [0] * (SIDES + 1)
        self.recorded: list[tuple[int, int]] = [(0, 0)] * EVENTS
        self.works: list[Any] = []
        self.matrices = [torch.empty(size, size, device="cuda") for size in SIZES]
        self.small = torch.empty(max(ELEMENTS), device="cuda")
        self.large = torch.empty(2 * max(ELEMENTS), device="cuda")
        for number, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                mark(f"stream is {number}")

    def run(self, actions: list[Action]) -> None:
        for name, stream, *arguments in actions:
            with torch.cuda.stream(self.streams[stream]):
                getattr(self, name)(stream, *arguments)

    @contextmanager
    def call(self, stream: int, what: str) -> Iterator[None]:
        """Marks on the current *stream* where a call that may wait begins and ends."""
        mark(f"from {what}")
        yield
        mark("to")
        self.calls[stream] += 1

    @contextmanager
    def host_waits(self, *targets: tuple[int, int]) -> Iterator[None]:
        """Marks on the compute stream where the host waits for streams with so many calls."""
        words = " ".join(f"{stream}:{calls}" for stream, calls in targets if stream)
        with torch.cuda.stream(self.streams[0]), self.call(0, f"host {words}"):
            yield

    def sleep(self, _: int) -> None:
        longest = self.own.choice([50, 500, 3000])
        torch.cuda._sleep(self.own.randint(5, longest) * CYCLES_PER_US)

    def multiply(self, _: int) -> None:
        matrix = self.own.choice(self.matrices)
        torch.mm(matrix, matrix)

    def pause(self, _: int) -> None:
        time.sleep(self.own.uniform(0.001, 0.005))

    def issue(self, stream: int, kind: str, group: int, elements: int, asynchronous: bool) -> None:
        if asynchronous and len(self.works) < MOST_WORKS:
            self.works.append(self.collective(kind, self.groups[group], elements, True))
            return
        with self.call(stream, "collective"):
            work = self.collective(kind, self.groups[group], elements, False)
            if work is not None:
                work.wait()

    def collective(self, kind: str, group: Any, elements: int, asynchronous: bool) -> Any:
        small, large = self.small[:elements], self.large[: 2 * elements]
        how = {"group": group, "async_op": asynchronous}
        if kind == "all_reduce":
            return dist.all_reduce(small, **how)
        if kind == "all_gather":
            return dist.all_gather_into_tensor(large, small, **how)
        if kind == "reduce_scatter":
            return dist.reduce_scatter_tensor(small, large, **how)
        if kind == "broadcast":
            return dist.broadcast(small, 0, **how)
        if kind == "all_to_all":
            return dist.all_to_all_single(large[:elements], small, **how)
        peer = 1 - dist.get_rank()
        sends = dist.P2POp(dist.isend, small, peer, group)
        receives = dist.P2POp(dist.irecv, large[:elements], peer, group)
        (work,) = dist.batch_isend_irecv([sends, receives])
        return work

    def wait(self, stream: int, which: float) -> None:
        """Waits for the newest work, or for another one."""
        if self.works:
            work = self.works.pop(-1 if which == 1 else int(which * len(self.works)))
            with self.call(stream, "collective"):
                work.wait()

    def barrier(self, stream: int) -> None:
        with self.call(stream, "collective"):
            dist.barrier()

    def wait_stream(self, stream: int, other: int) -> None:
        with self.call(stream, f"stream {other}:{self.calls[other]}"):
            self.streams[stream].wait_stream(self.streams[other])

    def record(self, stream: int, number: int) -> None:
        self.events[number].record()
        self.recorded[number] = stream, self.calls[stream]

    def wait_event(self, stream: int, number: int) -> None:
        target, calls = self.recorded[number]
        with self.call(stream, f"stream {target}:{calls}"):
            self.streams[stream].wait_event(self.events[number])

    def synchronize(self, _: int) -> None:
        with self.host_waits(*enumerate(self.calls)):
            torch.cuda.synchronize()

    def host_stream(self, stream: int) -> None:
        with self.host_waits((stream, self.calls[stream])):
            self.streams[stream].synchronize()

    def host_event(self, _: int, number: int) -> None:
        with self.host_waits(self.recorded[number]):
            self.events[number].synchronize()

    def item(self, _: int) -> None:
        with torch.cuda.stream(self.streams[0]):
            self.small[0].item()


def train(program: Program, count: int, shared: random.Random) -> None:
    """Trains; marks lie right before and right after each border of zeromon's phases."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.empty(8, 64, device="cuda")
    actions: list[list[Action]] = []

    def backward_begun(_: torch.Tensor) -> None:
        mark("border forward")
        Variable._execution_engine.queue_callback(lambda: mark("nearly backward"))
        program.run(actions[BACKWARD])

    def optimizer_begun(*_: Any) -> None:
        mark("border other")
        program.run(actions[OPTIMIZER])

    optimizer.register_step_pre_hook(optimizer_begun)
    optimizer.register_step_post_hook(lambda *_: mark("nearly optimizer"))
    torch.cuda._sleep(20_000 * CYCLES_PER_US)  # the host is ahead when the first phase ends
    for _ in range(count):
        for actions in draw_step(shared):
            program.run(actions[FORWARD])
            loss = model(inputs).sum()
            loss.register_hook(backward_begun)
            mark("nearly forward")
            loss.backward()
            mark("border backward")
        program.run(actions[OTHER])
        if shared.random() < 0.8:  # else work goes on beyond the end of the step
            program.run([("wait", 0, 1.0)] * len(program.works))
        mark("nearly other")
        optimizer.step()
        mark("border optimizer")
        mark("step")


def main() -> None:
    count, seed = map(int, sys.argv[1:])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    train(Program(random.Random(seed + dist.get_rank() + 1)), count, random.Random(seed))
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
