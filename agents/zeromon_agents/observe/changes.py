"""The changes that can be tried in a live rank. None can change a result (decision 080).

A change is a generator. Up to its first ``yield`` it examines the process and changes nothing; it
raises :class:`Unfit` where it cannot be made. The second ``next`` makes the change, every further one is
the end of a training step, and its ``finally`` undoes all of it.
"""

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from zeromon.ring.trials import Change
from zeromon_agents.observe.torch_roles import Models, fsdp2_groups, param_groups


class Unfit(Exception):
    """The change cannot be made in this process."""


def shared_collections(_: Models) -> Iterator[None]:
    """Python collects no garbage by itself; the undoing collects, at the same step of all ranks.

    Nothing is frozen: that matters to a full collection alone, and the script may have frozen objects.
    """
    if not gc.isenabled():
        raise Unfit("automatic garbage collection is off already")
    yield
    try:
        gc.disable()
        while True:
            yield
    finally:
        gc.collect(1)
        gc.enable()


def keep_gathered(models: Models) -> Iterator[None]:
    """FSDP2 keeps the parameters of each unit from its forward to its backward."""
    groups = [group for root in models.live()[0] for group in fsdp2_groups(root)]
    before = [(g, info) for g in groups if (info := g.post_forward_mesh_info) is not None]
    if not before:
        raise Unfit("no unit of FSDP2 frees its parameters after forward")
    yield
    try:
        for group, _ in before:
            group.post_forward_mesh_info = None
        while True:
            yield
            _free(before)
    finally:
        for group, info in before:
            group.post_forward_mesh_info = info
        _free(before)


def _free(units: list[tuple[Any, Any]]) -> None:
    """Frees what a forward without a backward has left: the optimizer does not update these copies."""
    for group, _ in units:
        if group.is_unsharded:
            group.reshard()


def prefetch(models: Models) -> Iterator[None]:
    """Each unit of FSDP2 asks for the parameters of the next one, in the order of the last forward."""
    roots = models.live()[0]
    by_group = {
        id(group): module
        for root in roots
        for module in root.modules()
        if module is not root and hasattr(module, "_get_fsdp_state")
        for group in param_groups(module._get_fsdp_state())
    }
    ran = dict.fromkeys(id(group) for group in models.order or ())
    units = list(dict.fromkeys(by_group[group] for group in ran if group in by_group))
    if len(units) < 2:
        raise Unfit("fewer than two units of FSDP2 ran in the last step")
    states = [unit._get_fsdp_state() for unit in units]
    before = [(s, s._states_to_forward_prefetch, s._states_to_backward_prefetch) for s in states]
    if any(forward or backward for _, forward, backward in before):
        raise Unfit("the script has set what units prefetch")
    groups = [group for root in roots for group in fsdp2_groups(root)]
    asynchronous = [(group, group.unshard_async_op) for group in groups]
    on_cpu = any(group.device.type == "cpu" for group in groups)
    yield
    try:
        for group in groups if on_cpu else ():  # gloo has no stream to run ahead on
            group.unshard_async_op = True
        for this, following in pairwise(units):
            this.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([this])
        while True:
            yield
    finally:
        for state, forward, backward in before:
            state._states_to_forward_prefetch = forward
            state._states_to_backward_prefetch = backward
        for group, was in asynchronous:
            group.unshard_async_op = was


CHANGES: dict[Change, Callable[[Models], Iterator[None]]] = {
    Change.SHARED_COLLECTIONS: shared_collections,
    Change.KEEP_GATHERED: keep_gathered,
    Change.PREFETCH: prefetch,
}
