"""The way out of a test program that had a gloo group."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from typing import Any

_held: list[Any] = []


def leave() -> None:
    """Runs what is registered at exit, and goes without the interpreter's own finalization.

    Torch's gloo threads outlive ``destroy_process_group``; some exits (one in some hundred, with
    zeromon or without) end in "terminate called without an active exception".
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def hold_groups() -> None:
    """Keeps every process group alive until the process ends.

    torch 2.13 can deadlock, with zeromon or without, when the last reference to a group goes right
    after a backward pass: ``~ProcessGroupGloo`` waits with the interpreter's lock for a gloo thread,
    and that thread waits for the interpreter's lock to free the context that
    ``torch.autograd.graph._engine_run_backward`` has stored for its work.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    destroy = c10d.destroy_process_group
    if hasattr(destroy, "holds_groups"):
        return

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        _held.extend(c10d._world.pg_map)
        destroy(*args, **kwargs)

    destroy_process_group.holds_groups = True  # type: ignore[attr-defined]
    dist.destroy_process_group = c10d.destroy_process_group = destroy_process_group
