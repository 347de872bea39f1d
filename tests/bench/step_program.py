"""Trains while the agent is switched on and off from step to step; run by bench_step.py.

Steps come in the order on, off, off, on: a drift touches both alike. Rank 0 prints one JSON list of
[mode, nanoseconds of the step, nanoseconds that the agent accounts for in it, CPU time of its process].
In a run without the agent nothing is switched, and nothing accounted.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

from zeromon.ring.buffer import NameKind, RingReader

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OFF, ON = 0, 2
ORDER = (ON, OFF, OFF, ON)
DETAIL_EVERY = 9
times: list[tuple[int, int, int, int]] = []
state = {"mode": ON, "began": 0, "count": 0, "accounted": 0, "cpu": 0}
costs: dict[str, int] = {}


def example(name: str):
    """One of the examples, as a module."""
    sys.path.insert(0, str(EXAMPLES))  # one of them imports the other
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accounted(agent) -> int:
    """Nanoseconds that the agent has accounted for, as zeromon.fold.summarize adds them up."""
    if not costs:
        for name in RingReader(agent.ring.path).names():
            if name.kind == NameKind.META:
                costs.update({k: v for k, v in name.payload.items() if k.endswith("_ns")})
    counter = agent.ring.slots.following.__self__
    # itertools.count shows its value only so
    records = counter.__reduce__()[1][0] if agent.context.recorder is None else counter.next
    context = agent.context
    charged = records * costs["record_ns"] + context.calls * costs["call_ns"]
    return charged + context.spent_ns + context.hooks_ns


def after_step(*_) -> None:
    """Called when a step has ended: decides what the agent does in the next."""
    now, cpu = time.perf_counter_ns(), time.process_time_ns()
    agent = None
    if "ZEROMON_RUN_DIR" in os.environ:
        from zeromon_agents.runtime.bootstrap import BOOTSTRAP

        agent = BOOTSTRAP.agent
    until = 0 if agent is None else accounted(agent)
    if state["began"]:
        times.append(
            (state["mode"], now - state["began"], until - state["accounted"], cpu - state["cpu"])
        )
    state["accounted"] = until
    state["count"] += 1
    if agent is not None:
        count, context = state["count"], agent.context
        state["mode"] = context.mode = ORDER[count % 4]
        context.detailed = False
        context.timing = context.mode == ON and count // 2 % DETAIL_EVERY == 0
    state["cpu"], state["began"] = time.process_time_ns(), time.perf_counter_ns()


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
        print("TIMES " + json.dumps(times))
