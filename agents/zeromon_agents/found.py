"""Models, optimizers and engines that exist already, in a run that does not move.

Where a run moves, our hooks meet each of them at its next forward or step, and nothing is searched.
Where it stands still, the garbage collector names what refers to a class, its instances among them: one
call in C, 20 to 50 ms for a million objects, which a run that stands still does not miss. ``isinstance``
over all objects would take three times as long, and would wake proxies.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple

import torch

_ROOT_MODULES = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
)
_FSDP2_STATE = ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")
_ENGINE = ("deepspeed.runtime.engine", "DeepSpeedEngine")


class Found(NamedTuple):
    """What this process trains."""

    modules: list[Any]
    """The outermost wrapped ones."""
    optimizers: list[Any]
    engines: list[Any]


def find() -> Found:
    """Looks for instances of the classes that are loaded."""
    wrappers = _loaded(*_ROOT_MODULES)
    states = _loaded(_FSDP2_STATE)
    engines = _loaded(_ENGINE)
    optimizers = subclasses(torch.optim.Optimizer)
    kinds = {*wrappers, *states, *engines, *optimizers}
    if not kinds:
        return Found([], [], [])
    instances = [o for o in gc.get_referrers(*kinds) if type(o) in kinds]
    return Found(
        [o for o in instances if type(o) in wrappers and _is_root(o)]
        + _fsdp2_roots(o for o in instances if type(o) in states),
        [o for o in instances if type(o) in optimizers and o.param_groups],
        [o for o in instances if type(o) in engines],
    )


def subclasses(kind: type) -> set[type]:
    """*kind* and all that derives from it."""
    found: set[type] = set()
    waiting = [kind]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += type.__subclasses__(one)
    return found


def _loaded(*names: tuple[str, str]) -> set[type]:
    """Those of the named classes whose module is loaded, with their subclasses."""
    found: set[type] = set()
    for module, name in names:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type):
            found |= subclasses(kind)
    return found


def _is_root(module: Any) -> bool:
    """Whether it is not within another wrapped module; FSDP1 knows that after its first forward."""
    return vars(module).get("_is_root") is not False


def _fsdp2_roots(states: Any) -> list[Any]:
    roots = []
    for state in states:
        modules = vars(state).get("_modules") or ()
        if vars(state).get("_is_root") and modules:
            roots.append(modules[0])
    return roots
