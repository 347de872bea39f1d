"""Trains on 2 ranks while the agent is switched on and off from step to step.

Run by bench_step.py. Steps come in the order on, off, off, on: a drift touches both alike. Rank 0
prints one JSON list of [mode, nanoseconds].
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OFF, ON = 0, 2
ORDER = (ON, OFF, OFF, ON)
times: list[tuple[int, int]] = []
state = {"mode": ON, "began": 0, "count": 0}


def example(name: str):
    """One of the examples, as a module."""
    sys.path.insert(0, str(EXAMPLES))  # one of them imports the other
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def after_step(*_) -> None:
    """Called when a step has ended: decides what the agent does in the next."""
    from zeromon_agents.runtime.bootstrap import BOOTSTRAP

    context = BOOTSTRAP.agent.context
    now = time.perf_counter_ns()
    if state["began"]:
        times.append((state["mode"], now - state["began"]))
    state["count"] += 1
    state["mode"] = context.mode = ORDER[state["count"] % 4]
    context.detailed = False
    state["began"] = time.perf_counter_ns()


def train_torch() -> None:
    """Steps end in the optimizer, whose hooks torch calls in the order of their registration."""
    import torch.optim.optimizer as optimizer

    program = example("train_gpt")
    optimizer.register_optimizer_step_post_hook(after_step)
    program.train(program.parse(sys.argv[1:]))


def train_deepspeed() -> None:
    """Steps end in the engine: stage 3 calls its optimizer once a group of parameters."""
    program = example("train_gpt_deepspeed")
    engine = program.deepspeed.DeepSpeedEngine
    original = engine.step

    def step(*args, **kwargs):
        result = original(*args, **kwargs)
        after_step()
        return result

    engine.step = step
    program.train(program.parse(sys.argv[1:]))


if __name__ == "__main__":
    train_deepspeed() if "--config" in sys.argv else train_torch()
    if times and os.environ["RANK"] == "0":
        print("TIMES " + json.dumps(times[20:]))
