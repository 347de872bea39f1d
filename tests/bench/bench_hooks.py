"""What a hook costs, beside the bare call, in one process: `python tests/bench/bench_hooks.py`.

The wrapped functions do nothing, so that what is measured is the hook alone. Each figure is the
least of several rounds that take turns.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeromon.ring import RingWriter
from zeromon_agents.c10d import PAYLOADS, Collectives
from zeromon_agents.guard import Guard
from zeromon_agents.pending import DeviceTimer
from zeromon_agents.recorder import IDLE, OFF, ON, Recorder

ROUNDS, CALLS = 15, 10_000


def least(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Nanoseconds a call of each function, the least of ROUNDS interleaved rounds."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            began = time.perf_counter_ns()
            for _ in range(CALLS):
                function()
            best[name] = min(best[name], (time.perf_counter_ns() - began) / CALLS)
    return best


def measure() -> dict[str, float]:
    """The figures, in nanoseconds."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    ring = RingWriter(folder / "rank0.ring", rank=0)
    with_crc = RingWriter(folder / "rank1.ring", rank=1, crc=True)
    recorder = Recorder(ring, Guard())
    collectives = Collectives(recorder, DeviceTimer(recorder))
    group, tensor = dist.group.WORLD, torch.ones(1024)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    options = dist.AllreduceOptions()
    options.asyncOp = False

    def bare_issue(pg: Any, *args: Any, **kwargs: Any) -> Any:
        return work

    def bare_wait(work: Any, *args: Any, **kwargs: Any) -> bool:
        return True

    issue = collectives._issue_hook(bare_issue, "allreduce", PAYLOADS["allreduce"])
    wait = collectives._wait_hook(bare_wait)
    payload = [tensor]
    recorder.mode = ON
    issue(group, payload, options)
    collectives.end_warm_up()

    def at(mode: int, function: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> None:
            recorder.mode = mode
            function()

        return call

    def pair() -> None:
        wait(issue(group, payload, options))

    figures = least(
        {
            "switch": at(ON, lambda: None),
            "bare": at(ON, lambda: bare_wait(bare_issue(group, payload, options))),
            "on": at(ON, pair),
            "counting": at(IDLE, pair),
            "off": at(OFF, pair),
            "ring": lambda: ring.write(1, 2, 3, 4, 5, 6, 7),
            "ring_crc": lambda: with_crc.write(1, 2, 3, 4, 5, 6, 7),
            "call": lambda: None,
        }
    )
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return figures


def step_cost() -> float:
    """Nanoseconds that a step costs besides its collectives: phases, marks, samples, accounting."""
    folder = Path(tempfile.mkdtemp())
    os.environ.update(ZEROMON_RUN_DIR=str(folder), ZEROMON_COLLECTOR="off")
    import zeromon_agents
    from zeromon_agents.bootstrap import BOOTSTRAP

    zeromon_agents.start()
    agent = BOOTSTRAP.agent
    assert agent is not None
    steps = agent.steps
    times = []
    for _ in range(2000):
        began = time.perf_counter_ns()
        steps.data_begins()
        steps.data_ends()
        steps.forward_begins()
        steps.forward_ends()
        steps.backward_begins()
        steps.backward_ends()
        steps.optimizer_begins(None)
        steps.optimizer_ends()
        times.append(time.perf_counter_ns() - began)
    zeromon_agents.stop()
    shutil.rmtree(folder)
    return statistics.median(times)


def main() -> None:
    """Prints the figures as text, and as JSON on the last line."""
    figures = measure()
    bare = figures["bare"]
    rows = {
        "collective, recorded (issue + wait)": (figures["on"] - bare, 2000),
        "collective, counted only (issue + wait)": (figures["counting"] - bare, 2000),
        "detached hook still in place (a call)": ((figures["off"] - bare) / 2, 100),
        "a step, besides its collectives": (step_cost(), 100_000),
        "ring write": (figures["ring"] - figures["call"], 1000),
        "ring write with CRC (not x86)": (figures["ring_crc"] - figures["call"], 1000),
    }
    for name, (nanoseconds, target) in rows.items():
        print(f"{name:42} {nanoseconds:7.0f} ns   target {target} ns")
    print(f"{'detached agent (originals restored)':42} {0:7.0f} ns   by identity: test_hooks.py")
    print(json.dumps({name: round(value) for name, (value, _) in rows.items()}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
