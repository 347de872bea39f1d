"""FSDP1 (``FullyShardedDataParallel``): units by their flat parameter, and forward.

Its runtime is module-level functions that call each other through the module's globals, so they
are replaced there.
"""

from __future__ import annotations

import functools
from typing import Any

from zeromon.events import UnitEvent
from zeromon_agents.fsdp2 import Units
from zeromon_agents.guard import Guard
from zeromon_agents.patches import Patches
from zeromon_agents.step import Steps

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

    def __init__(self, units: Units, steps: Steps, patches: Patches) -> None:
        self._units = units
        self._recorder = units.recorder
        self._steps = steps
        self._patches = patches
        self._told_strategy = False

    def watch_runtime(self, module: Any) -> None:
        """Patches the functions that unshard, reshard and reduce a unit."""
        for name, event in (
            ("_unshard", UnitEvent.UNSHARD),
            ("_reshard", UnitEvent.RESHARD),
            ("_reduce_grad", None),
        ):
            original = self._patches.original(module, name)
            hooked = self._units.within(self.unit_of, event)(original, 1)
            self._patches.set(module, name, hooked)

    def watch_wrapper(self, module: Any) -> None:
        """Patches the wrapper's forward; only the outermost one counts."""
        wrapper = module.FullyShardedDataParallel
        original = self._patches.original(wrapper, "forward")
        steps, recorder, timer = self._steps, self._recorder, self._units.device

        @functools.wraps(original)
        def forward(fsdp: Any, *args: Any, **kwargs: Any) -> Any:
            root = False
            if recorder.mode:
                try:
                    root = fsdp._is_root is not False
                    if root:
                        timer.mark_compute_stream()
                        self._strategy(fsdp)
                        steps.forward_begins()
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "FullyShardedDataParallel.forward")
            try:
                return original(fsdp, *args, **kwargs)
            finally:
                if root:
                    steps.forward_ends()

        self._patches.set(wrapper, "forward", forward)

    def _strategy(self, fsdp: Any) -> None:
        if not self._told_strategy:
            self._told_strategy = True
            name = getattr(fsdp.sharding_strategy, "name", "")
            self._recorder.meta(strategy=_STRATEGIES.get(name, "fsdp1"))

    def unit_of(self, handle: Any) -> int:
        """The id of the unit whose flat parameter *handle* manages; 0 for none."""
        if handle is None:
            return 0
        known = getattr(handle, "_zeromon_unit", None)
        if known is not None and known[0] is self._recorder:
            return int(known[1])
        fqns = list(getattr(handle.flat_param, "_fqns", ()))
        facts = {"params": len(fqns), "kind": "fsdp1"}
        number = self._recorder.unit_id(common_module(fqns), facts)
        handle._zeromon_unit = (self._recorder, number)
        return number


def common_module(fqns: list[str]) -> str:
    """The module that all parameters of a flat parameter share; ``(root)`` for the outermost."""
    modules = [fqn.split(".")[:-1] for fqn in fqns]
    if not modules:
        return "(root)"
    shared: list[str] = []
    for parts in zip(*modules, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(part for part in shared if part != "_fsdp_wrapped_module") or "(root)"
