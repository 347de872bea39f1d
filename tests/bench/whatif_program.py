"""A program of bench_whatif.py: trains in turns (turns_program.py), changed by the environment.

``DELAY``: seconds by which each forward of rank 1 is longer. ``BUCKET``: DDP's bucket_cap_mb.
``PREFETCH``: units that FSDP2 gathers ahead.
"""

import os
import sys
import time

import step_program
import turns_program
from torch.nn.parallel import DistributedDataParallel

DELAY, PREFETCH = float(os.environ.get("DELAY", 0)), int(os.environ.get("PREFETCH", 0))


def slowed(model: type) -> None:
    """Each forward of rank 1 takes longer."""
    forward = model.forward

    def method(self, *arguments):
        if turns_program.RANK == 1:
            time.sleep(DELAY)
        return forward(self, *arguments)

    model.forward = method


def ahead(model) -> None:
    """FSDP2 gathers units ahead, on a CPU as an asynchronous collective."""
    units = list(model.layers)
    for unit in (model, *units):
        unit._set_unshard_async_op(True)
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + PREFETCH])
        unit.set_modules_to_backward_prefetch(units[max(0, index - PREFETCH) : index][::-1])


def example(name: str):
    """The example, changed."""
    module = original(name)
    if DELAY:
        slowed(module.GPT)
    wrap = getattr(module, "wrap", None)

    def wrapped(model, options, device):
        if "BUCKET" in os.environ:
            return DistributedDataParallel(model, bucket_cap_mb=int(os.environ["BUCKET"]))
        result = wrap(model, options, device)
        if PREFETCH:
            ahead(result)
        return result

    module.wrap = wrapped
    return module


if __name__ == "__main__":
    original, step_program.example = step_program.example, example
    step_program.after_step = turns_program.after_step
    if "--config" in sys.argv:
        step_program.train_deepspeed()
    else:
        step_program.train_torch()
