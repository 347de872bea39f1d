"""FSDP2 (``fully_shard``): units, their unshard and reshard, and forward.

Private names of torch that FSDP2 hooks use stand here; each has a canary test. The methods of
FSDPParamGroup are looked up on the instance at every call, so patching the class works at any time.
They run outside of compiled regions, so no graph breaks.
"""

import functools
import math
import time
from collections.abc import Iterable
from typing import Any

import torch

from zeromon.ring.codes import Phase, UnitEvent
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Strategy, fsdp2_strategy
from zeromon_agents.hooks.backend import UNIT_ATTRIBUTE, Backend, ImportHook
from zeromon_agents.observe import model_metadata
from zeromon_agents.observe.torch_roles import fsdp2_groups, param_groups
from zeromon_agents.runtime.around import RAISED, SKIP, around
from zeromon_agents.runtime.hook_context import ON

PARAM_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


class Fsdp2(Backend):
    """The hooks on FSDPParamGroup and FSDPState."""

    classes = ((STATE, "FSDPState"),)
    _wrote_strategy = False

    def hooks(self) -> Iterable[ImportHook]:
        """Patches FSDPParamGroup and FSDPState."""
        return ((PARAM_GROUP, self.watch_param_group), (STATE, self.watch_state))

    def watch_param_group(self, module: Any) -> None:
        """Patches FSDPParamGroup of *module*."""
        # They run outside of compiled regions
        context, within_unit = self.context, functools.partial(self.units.within, traced=False)
        hooks = {
            "unshard": around(
                context, self._unshard_begins, self._unshard_ends, scoped=True, active_from=ON
            ),
            "wait_for_unshard": around(
                context, self._wait_begins, self._wait_ends, scoped=True, active_from=ON
            ),
            "reshard": within_unit(self.describe_unit, UnitEvent.RESHARD, will_reshard),
            "post_backward": within_unit(self.describe_unit),
            "finalize_backward": within_unit(self.describe_unit),
            "post_forward": around(context, self._post_forward),
        }
        for name, hook in hooks.items():
            self.patches.wrap(module.FSDPParamGroup, name, hook)

    def watch_state(self, module: Any) -> None:
        """Patches FSDPState of *module*, whose root starts the forward."""
        self.wrap(module.FSDPState, "_root_pre_forward", self._root_pre_forward)

    def adopt(self, instance: Any) -> None:
        """Registers the root module of an FSDPState."""
        modules = vars(instance).get("_modules") or ()
        if vars(instance).get("_is_root") and modules:
            self.models.register_module(modules[0])

    def model_metadata(self, module: Any, optimizers: list[Any]) -> ModelMetadata | None:
        """Returns the sizes and settings of a ``fully_shard`` root."""
        groups = list(fsdp2_groups(module))
        return model_metadata.of_fsdp2(module, groups, optimizers) if groups else None

    def describe_unit(self, group: Any) -> tuple[str, dict[str, Any]] | None:
        """Returns name and description of the unit of an FSDPParamGroup; None before lazy init."""
        fqn = getattr(group, "_module_fqn", None)
        if fqn is None:
            return None  # lazy init names the group
        return fqn or "(root)", {
            "params": len(group.fsdp_params),
            "kind": "fsdp2",
            "nbytes": sum(map(_unsharded_bytes, group.fsdp_params)),
        }

    # ---- hooks --------------------------------------------------------------------------------

    def _root_pre_forward(
        self, fsdp_state: Any, module: Any, args: Any = (), kwargs: Any = None, *_: Any, **__: Any
    ) -> None:
        # FSDP2 calls this for each wrapped module; the attribute is set while a root's forward runs
        if fsdp_state._state_ctx.iter_forward_root is not None:
            return
        self.models.register_module(module)
        self.steps.forward_begins(module, args, kwargs)
        self.device.mark_compute_stream()
        if not self._wrote_strategy:
            self._wrote_strategy = True
            self.context.add_metadata(**strategy_of(fsdp_state).metadata())

    def _post_forward(self, group: Any, *_: Any, **__: Any) -> None:
        self.steps.forward_seen()
        order = self.models.order
        # Activation checkpointing runs forwards in backward again, in another order
        if order is not None and self.context.phase == Phase.FORWARD and group not in order:
            order.append(group)

    def _unshard_begins(self, group: Any, *_: Any, **__: Any) -> object:
        """Sets the unit of the gather; returns SKIP where the gather is under way already."""
        if group._all_gather_result is not None:
            return SKIP
        context, (owner, unit) = self.context, getattr(group, UNIT_ATTRIBUTE, (None, 0))
        context.unit = unit if owner is context else self.units.id_of(group, self.describe_unit)
        return None

    def _unshard_ends(self, _: None, result: Any, group: Any, *__: Any) -> None:
        # torch returns without a gather where the unit is still unsharded
        if result is not RAISED and group._all_gather_result is not None:
            self.units.mark(UnitEvent.UNSHARD, self.context.unit)

    def _wait_begins(self, group: Any, *_: Any, **__: Any) -> object:
        """Returns the time in nanoseconds; SKIP where there is no gather to wait for."""
        if getattr(group, "_all_gather_result", None) is None:
            return SKIP
        reached = time.monotonic_ns()
        context, (owner, unit) = self.context, getattr(group, UNIT_ATTRIBUTE, (None, 0))
        context.unit = unit if owner is context else self.units.id_of(group, self.describe_unit)
        return reached

    def _wait_ends(self, reached: int | None, *_: Any) -> None:
        if reached is not None:
            blocked = time.monotonic_ns() - reached
            self.units.mark(UnitEvent.WAIT_UNSHARD, self.context.unit, blocked)


def will_reshard(group: Any, *_: Any) -> bool:
    """Returns whether ``reshard`` frees anything: some units stay gathered after forward."""
    # `name` of an enumeration enters two functions
    in_forward = getattr(getattr(group, "_training_state", None), "_name_", "") == "FORWARD"
    return not in_forward or bool(getattr(group, "_reshard_after_forward", True))


def strategy_of(fsdp_state: Any) -> Strategy:
    """Returns how the root with the state *fsdp_state* shards its model.

    torch before 2.8 does not tell a default from a choice; there the units themselves say it. The root's
    own, once it has run, does not: torch keeps it gathered.
    """
    states = getattr(getattr(fsdp_state, "_state_ctx", None), "all_states", None) or [fsdp_state]
    units = [group for state in states for group in param_groups(state)]
    reshards = bool(getattr(fsdp_state, "_auto_reshard_after_forward", not units)) or any(
        getattr(unit, "post_forward_mesh_info", None) is not None for unit in units
    )
    group = next(iter(param_groups(fsdp_state)), None)
    if group is None:
        return fsdp2_strategy(reshards=reshards)
    replicas = int(getattr(getattr(group, "mesh_info", None), "replicate_mesh_size", 1))
    params = getattr(group, "fsdp_params", ())
    offloads = any(getattr(param, "offload_to_cpu", False) for param in params)
    return fsdp2_strategy(reshards=reshards, hybrid=replicas > 1, offload=offloads)


def _unsharded_bytes(param: Any) -> int:
    """Returns the bytes of a parameter while it is gathered."""
    dtype = getattr(param, "param_dtype", None) or getattr(param, "orig_dtype", torch.float32)
    return int(math.prod(param._orig_size) * dtype.itemsize)
