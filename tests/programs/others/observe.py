"""What a process does, without its knowledge and without zeromon: digests of steps, and a count.

A `.pth` file of the environment imports this at the start of every Python; it does nothing where OBSERVE
names no folder. After each step of a torch optimizer it writes a digest of the parameters that the
optimizer holds, in the process's own file. With COUNT, torch's profiler runs from the first process
group to the end of the process, and what the dispatcher calls in `c10d` is written, too.
"""

import hashlib
import importlib.util
import json
import os
import sys
from collections import Counter
from pathlib import Path

FOLDER = os.environ.get("OBSERVE", "")


class _After:
    """A finder that calls *then* with a module once that is loaded."""

    def __init__(self, name, then):
        self.name, self.then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def _file(kind):
    """The file of this rank in this attempt of its launcher."""
    rank = os.environ.get("RANK")
    if rank is None:
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_initialized() else 0
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Path(FOLDER, f"{rank}.{attempt}.{kind}")


def _digest_steps(module):
    module.register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer, *_):
    import torch

    digest = hashlib.sha256()
    for group in optimizer.param_groups:
        for param in group["params"]:
            local = getattr(param, "_local_tensor", param).detach().cpu()
            digest.update(local.contiguous().flatten().view(torch.uint8).numpy())
    with _file("steps").open("a") as lines:
        lines.write(f"{digest.hexdigest()[:16]}\n")


def _count_collectives(module):
    initialize = module.init_process_group
    started = []

    def init_process_group(*args, **kwargs):
        initialize(*args, **kwargs)
        if not started:
            started.append(_profiler())

    module.init_process_group = init_process_group


def _profiler():
    import atexit
    import multiprocessing.util

    import torch
    from torch._C._profiler import _ExperimentalConfig

    file = _file("count")
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    profiler.start()

    def stop():
        profiler.stop()
        events = profiler.profiler.kineto_results.events()
        names = Counter(event.name() for event in events if event.name().startswith("c10d::"))
        file.write_text(json.dumps(names))

    if multiprocessing.parent_process() is None:
        atexit.register(stop)
    else:  # a spawned process runs no exit functions, but its finalizers
        multiprocessing.util.Finalize(None, stop, exitpriority=0)
    return profiler


if FOLDER:
    for stream in (sys.stdout, sys.stderr):  # a line is one write: lines of ranks do not mix
        stream.reconfigure(line_buffering=True, write_through=False)
    sys.meta_path.insert(0, _After("torch.optim.optimizer", _digest_steps))
    if os.environ.get("COUNT"):
        sys.meta_path.insert(0, _After("torch.distributed.distributed_c10d", _count_collectives))
