"""FSDP1 (``FullyShardedDataParallel``): units by their flat parameter, and forward.

FSDP1's runtime is module-level functions that call each other through the module's globals, so they
are patched in the module.
"""

import math
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from zeromon.ring.codes import UnitEvent
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Offload, Sharding, Strategy, fsdp1_strategy
from zeromon_agents.hooks.backend import Backend, ImportHook, Services
from zeromon_agents.observe import model_metadata
from zeromon_agents.observe.torch_roles import fsdp1_handles
from zeromon_agents.runtime.around import RAISED, SKIP

RUNTIME = "torch.distributed.fsdp._runtime_utils"
WRAPPER = "torch.distributed.fsdp.fully_sharded_data_parallel"

STRATEGIES = {
    "FULL_SHARD": fsdp1_strategy(Sharding.FULL),
    "SHARD_GRAD_OP": fsdp1_strategy(Sharding.GRAD_OP),
    "HYBRID_SHARD": fsdp1_strategy(Sharding.FULL, hybrid=True),
    "_HYBRID_SHARD_ZERO2": fsdp1_strategy(Sharding.GRAD_OP, hybrid=True),
    "NO_SHARD": fsdp1_strategy(Sharding.NONE),
}
"""Every ``ShardingStrategy`` of torch, by name."""


class Fsdp1(Backend):
    """The hooks on FSDP1's runtime and on its wrapper."""

    classes = ((WRAPPER, "FullyShardedDataParallel"),)

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._made: list[weakref.ref[Any]] = []
        """Wrappers until a root is known: torch.compile leaves the hook on a root's forward out."""
        self._fqns: dict[int, str] = {}

    def hooks(self) -> Iterable[ImportHook]:
        """Patches the runtime's functions and the wrapper."""
        return ((RUNTIME, self.watch_runtime), (WRAPPER, self.watch_wrapper))

    def watch_runtime(self, module: Any) -> None:
        """Patches the functions that unshard, reshard and reduce a unit."""
        for name, event, happens in (
            ("_unshard", UnitEvent.UNSHARD, will_unshard),
            ("_reshard", UnitEvent.RESHARD, will_reshard),
            ("_reduce_grad", None, None),
        ):
            hook = self.units.within(self.describe_unit, event, happens, subject=1)
            self.patches.wrap(module, name, hook)

    def watch_wrapper(self, module: Any) -> None:
        """Patches the wrapper's constructor, and its forward, of which only the outermost one counts."""
        wrapper, forward_hook = module.FullyShardedDataParallel, self._forward_begins
        self.wrap(wrapper, "__init__", after=self._note)
        self.wrap(wrapper, "forward", forward_hook, self._forward_ends, traced=True)

    def adopt(self, instance: Any) -> None:
        """Registers an outermost wrapper; before its first forward every wrapper counts as one."""
        if vars(instance).get("_is_root") is not False:
            self.models.register_module(instance)

    def model_metadata(self, module: Any, optimizers: list[Any]) -> ModelMetadata | None:
        """Returns the sizes and settings of a module with flat parameters."""
        handles = list(fsdp1_handles(module))
        return model_metadata.of_fsdp1(module, handles, optimizers) if handles else None

    def describe_unit(self, handle: Any) -> tuple[str, dict[str, Any]] | None:
        """Returns name and description of the unit of a flat parameter's *handle*.

        None where there is no handle, and before the root's first forward.
        """
        fqn = self._fqns.get(id(handle))
        if fqn is None:
            return None
        return fqn, {
            "params": len(getattr(handle.flat_param, "_fqns", ())),
            "kind": "fsdp1",
            "nbytes": _unsharded_bytes(handle),
        }

    def look(self) -> None:
        """Registers the roots that torch has found in a compiled forward."""
        wrappers = [(ref, wrapper) for ref in self._made if (wrapper := ref()) is not None]
        # Until its first forward, torch has None there; each batch before that comes here, too
        self._made = [ref for ref, wrapper in wrappers if wrapper._is_root is None]
        for _, wrapper in wrappers:
            if wrapper._is_root:
                self._register_root(wrapper)

    def _note(self, _: None, result: Any, wrapper: Any, *__: Any) -> None:
        if result is not RAISED:
            self._made.append(weakref.ref(wrapper))

    def _forward_begins(self, fsdp: Any, *args: Any, **kwargs: Any) -> object:
        """Starts the forward phase of the root; returns SKIP for the wrappers inside."""
        # Not `not`: torch has None there until the root's first forward has initialized FSDP
        if fsdp._is_root is False:
            return SKIP
        self._register_root(fsdp)
        self.steps.forward_begins(fsdp, args, kwargs)
        self.device.mark_compute_stream()
        return None

    def _forward_ends(self, *_: Any) -> None:
        self.steps.forward_ends()

    def _register_root(self, root: Any) -> None:
        """Writes the strategy at the first forward of *root*, and keeps the names of its units."""
        registered = self._roots.get(id(root))
        # Another root may have the address of a deleted one
        if registered is not None and registered() is root:
            return
        self._roots[id(root)] = weakref.ref(root)
        self.models.register_module(root)
        self.context.add_metadata(**strategy_of(root).metadata())
        for fqn, module in root.named_modules():
            handle = getattr(module, "_handle", None)
            if handle is not None:
                # Without FSDP's wrappers; (root) for the outermost module
                self._fqns[id(handle)] = (
                    ".".join(p for p in fqn.split(".") if p and p != "_fsdp_wrapped_module") or "(root)"
                )


def strategy_of(root: Any) -> Strategy:
    """Returns how the wrapper *root* shards its model."""
    strategy = STRATEGIES.get(
        getattr(root.sharding_strategy, "name", ""), fsdp1_strategy(Sharding.UNKNOWN)
    )
    offloads = getattr(getattr(root, "cpu_offload", None), "offload_params", False)
    return replace(strategy, offload=Offload.HOST) if offloads else strategy


def will_unshard(_: Any, handle: Any, *__: Any) -> bool:
    """Returns whether ``_unshard`` gathers: torch also calls it for a unit that is gathered already."""
    # A wrapper whose parameters are all in inner wrappers has no handle
    if not handle:
        return False
    # Not needs_unshard(), which enters ten functions; where it chooses between two precisions, it knows
    if hasattr(handle.flat_param, "_full_prec_full_param_padded"):
        return bool(handle.needs_unshard())
    gathered = getattr(handle.flat_param, "_full_param_padded", None)
    return gathered is not None and gathered.untyped_storage().nbytes() != gathered.nbytes


def will_reshard(_: Any, __: Any, frees: bool = True, *___: Any) -> bool:
    """Returns whether ``_reshard`` frees the gathered unit: not every strategy frees after forward."""
    return bool(frees)


def _unsharded_bytes(handle: Any) -> int:
    """Returns the bytes of the unit while it is gathered."""
    flat = handle.flat_param
    dtype = getattr(handle, "_fwd_bwd_param_dtype", None) or flat.dtype
    return int(math.prod(getattr(flat, "_unpadded_unsharded_size", flat.shape)) * dtype.itemsize)
