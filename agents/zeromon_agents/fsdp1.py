"""FSDP1 (``FullyShardedDataParallel``): units by their flat parameter, and forward.

Its runtime is module-level functions that call each other through the module's globals, so they
are replaced there.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any

import torch

from zeromon.events import UnitEvent
from zeromon_agents.fsdp2 import Units
from zeromon_agents.guard import Guard
from zeromon_agents.patches import Patches
from zeromon_agents.step import Steps
from zeromon_agents.torch_roles import Models

RUNTIME = "torch.distributed.fsdp._runtime_utils"
WRAPPER = "torch.distributed.fsdp.fully_sharded_data_parallel"

_STRATEGIES = {
    "FULL_SHARD": "fsdp1-full",
    "SHARD_GRAD_OP": "fsdp1-grad-op",
    "HYBRID_SHARD": "fsdp1-hybrid",
    "_HYBRID_SHARD_ZERO2": "fsdp1-hybrid-zero2",
    "NO_SHARD": "fsdp1-no-shard",
}


class Fsdp1:
    """The hooks on FSDP1's runtime."""

    def __init__(self, units: Units, steps: Steps, patches: Patches, models: Models) -> None:
        self._models = models
        self._units = units
        self._recorder = units.recorder
        self._steps = steps
        self._patches = patches
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._fqns: dict[int, str] = {}

    def watch_runtime(self, module: Any) -> None:
        """Patches the functions that unshard, reshard and reduce a unit."""
        for name, event, happens in (
            ("_unshard", UnitEvent.UNSHARD, will_unshard),
            ("_reshard", UnitEvent.RESHARD, will_reshard),
            ("_reduce_grad", None, will_reshard),
        ):
            original = self._patches.original(module, name)
            hooked = self._units.within(self.unit_of, event, happens)(original, 1)
            self._patches.set(module, name, hooked)

    def watch_wrapper(self, module: Any) -> None:
        """Patches the wrapper's forward; only the outermost one counts."""
        wrapper = module.FullyShardedDataParallel
        original = self._patches.original(wrapper, "forward")
        steps, recorder, timer = self._steps, self._recorder, self._units.device

        @functools.wraps(original)
        def forward(fsdp: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(fsdp, *args, **kwargs)
            root = False
            if recorder.mode:
                try:
                    root = fsdp._is_root is not False
                    if root:
                        timer.mark_compute_stream()
                        self._learn(fsdp)
                        steps.forward_begins()
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "FullyShardedDataParallel.forward")
            try:
                return original(fsdp, *args, **kwargs)
            finally:
                try:
                    if root:
                        steps.forward_ends()
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "FullyShardedDataParallel.forward")

        self._patches.set(wrapper, "forward", forward)

    def _learn(self, root: Any) -> None:
        """At the first forward of a root: the strategy, and the units' names."""
        known = self._roots.get(id(root))
        if known is not None and known() is root:
            return
        self._roots[id(root)] = weakref.ref(root)
        self._models.saw_module(root)
        name = getattr(root.sharding_strategy, "name", "")
        self._recorder.meta(strategy=_STRATEGIES.get(name, "fsdp1"))
        for fqn, module in root.named_modules():
            handle = getattr(module, "_handle", None)
            if handle is not None:
                self._fqns[id(handle)] = unwrapped(fqn)

    def unit_of(self, handle: Any) -> int:
        """The id of the unit whose flat parameter *handle* manages; 0 for none."""
        if handle is None:
            return 0
        known = self._units.known(handle)
        if known:
            return known
        fqn = self._fqns.get(id(handle))
        if fqn is None:
            return 0  # before the root's first forward
        facts = {
            "params": len(getattr(handle.flat_param, "_fqns", ())),
            "kind": "fsdp1",
            "nbytes": _unsharded_bytes(handle),
        }
        number = self._recorder.unit_id(fqn, facts)
        return self._units.learn(handle, number)


def will_unshard(_: Any, handle: Any, *__: Any) -> bool:
    """Whether ``_unshard`` gathers: it is also called for what is gathered already."""
    return bool(handle) and bool(handle.needs_unshard())


def will_reshard(_: Any, __: Any, frees: bool = True, *___: Any) -> bool:
    """Whether ``_reshard`` frees what is gathered: after forward not every strategy does."""
    return bool(frees)


def _unsharded_bytes(handle: Any) -> int:
    """Bytes of the unit while it is gathered."""
    flat = handle.flat_param
    dtype = getattr(handle, "_fwd_bwd_param_dtype", None) or flat.dtype
    return int(math.prod(getattr(flat, "_unpadded_unsharded_size", flat.shape)) * dtype.itemsize)


def unwrapped(fqn: str) -> str:
    """The name that a module has without FSDP's wrappers; ``(root)`` for the outermost."""
    return ".".join(p for p in fqn.split(".") if p and p != "_fsdp_wrapped_module") or "(root)"
