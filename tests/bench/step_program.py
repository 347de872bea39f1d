"""Trains on 2 ranks while the agent is switched on and off from step to step.

Run by bench_step.py. Steps come in the order on, off, off, on: a drift touches both alike. Rank 0
prints one JSON list of [mode, nanoseconds].
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

import torch.optim.optimizer as optimizer

spec = importlib.util.spec_from_file_location(
    "train_gpt", Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
)
train_gpt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train_gpt)

OFF, ON = 0, 2
ORDER = (ON, OFF, OFF, ON)
times: list[tuple[int, int]] = []
state = {"mode": ON, "began": 0, "count": 0}


def after_step(*_) -> None:
    """Registered before the agent's own hook is: torch calls hooks in that order, so set twice."""
    from zeromon_agents.bootstrap import BOOTSTRAP

    recorder = BOOTSTRAP.agent.recorder
    now = time.perf_counter_ns()
    if state["began"]:
        times.append((state["mode"], now - state["began"]))
    state["count"] += 1
    state["mode"] = recorder.mode = ORDER[state["count"] % 4]
    recorder.detailed = False
    state["began"] = time.perf_counter_ns()


if __name__ == "__main__":
    optimizer.register_optimizer_step_post_hook(after_step)
    train_gpt.train(train_gpt.parse(sys.argv[1:]))
    if times and __import__("os").environ["RANK"] == "0":
        print("TIMES " + json.dumps(times[20:]))
