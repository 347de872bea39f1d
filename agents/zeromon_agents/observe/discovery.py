"""Finds models, optimizers and engines that exist already, in a run that stands still.

In a run that moves, hooks meet each object at its next forward or step, and nothing is searched. In a
run that stands still, the garbage collector lists what refers to a class, which includes the class's
instances: one call in C of 20 to 50 ms for a million objects. ``isinstance`` over all objects would take
three times as long, and would trigger proxies.
"""

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch

ClassName = tuple[str, str]
"""Module and name of a class."""


def find(names: Iterable[ClassName]) -> tuple[dict[ClassName, list[Any]], list[Any]]:
    """Returns the instances of the named classes and their subclasses, and all optimizers.

    A class whose module is not loaded has no instances.
    """
    kinds = {name: _loaded(name) for name in names}
    optimizers = subclasses(torch.optim.Optimizer)
    instances = _instances(optimizers.union(*kinds.values()))
    return (
        {name: [o for o in instances if type(o) in kinds[name]] for name in kinds},
        [o for o in instances if type(o) in optimizers and o.param_groups],
    )


def _instances(kinds: set[type]) -> list[Any]:
    return [o for o in gc.get_referrers(*kinds) if type(o) in kinds]


def subclasses(kind: type) -> set[type]:
    """Returns *kind* and all classes that derive from it."""
    classes: set[type] = set()
    waiting = [kind]
    while waiting:
        one = waiting.pop()
        if one not in classes:
            classes.add(one)
            waiting += type.__subclasses__(one)
    return classes


def _loaded(name: ClassName) -> set[type]:
    module, attribute = name
    kind = getattr(sys.modules.get(module), attribute, None)
    return subclasses(kind) if isinstance(kind, type) else set()
