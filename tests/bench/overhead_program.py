"""Trains an example and prints, by its own clock, what its steps took: run by bench_overhead.py.

With ``INSIDE=1`` the hooks are timed where they run: the duration of each hook less that of the function
it wraps, and the optimizer hooks with all that they do. That is a count of the agent's cost which shares
nothing with the agent's own account.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch.optim.optimizer as optimizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WARM_UP = 20
moments: list[int] = []
hooks: list[int] = []
spent = 0


def timed(function, sign: int):
    """*function*, whose duration is added to what the hooks spent, or taken from it."""

    def call(*args, **kwargs):
        global spent
        began = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            spent += sign * (time.perf_counter_ns() - began)

    call.__name__ = getattr(function, "__name__", "call")
    call.__code__ = call.__code__.replace(co_name=call.__name__)  # pybind asks for it
    return call


def time_the_hooks() -> None:
    """Before the agent installs them."""
    from zeromon_agents.observe.step import Steps
    from zeromon_agents.runtime.patches import Patches

    original, put = Patches.original, Patches.set
    Patches.original = lambda self, owner, name: timed(original(self, owner, name), -1)
    Patches.set = lambda self, owner, name, hook: put(self, owner, name, timed(hook, 1))
    for name in ("optimizer_begins", "optimizer_ends"):
        setattr(Steps, name, timed(getattr(Steps, name), 1))


def step_ended(*_) -> None:
    """Notes the time, and what the hooks have spent until now."""
    moments.append(time.perf_counter_ns())
    hooks.append(spent)


if __name__ == "__main__":
    if os.environ.get("INSIDE"):
        time_the_hooks()
    sys.path.insert(0, str(EXAMPLES))
    import train_gpt

    optimizer.register_optimizer_step_post_hook(step_ended)
    train_gpt.train(train_gpt.parse(sys.argv[1:]))
    if os.environ["RANK"] == "0":
        span = moments[-1] - moments[WARM_UP]
        found = {"step_ns": span / (len(moments) - 1 - WARM_UP)}
        found["inside"] = (hooks[-1] - hooks[WARM_UP]) / span
        print("CLOCK " + json.dumps(found))
