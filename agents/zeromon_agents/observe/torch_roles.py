"""Memory roles of torch's own modules and optimizers: FSDP2, FSDP1, DDP, and any optimizer.

Hooks register a model at its wrapper's forward, and an optimizer at its step; both are held weakly. Each
private name of torch has a canary test, and a name that this torch lacks leaves its role out.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from zeromon.ring.codes import Role
from zeromon_agents.observe.census import Claims
from zeromon_agents.runtime.guard import Guard

_FLAT = (
    # while unsharded, the flat parameter's data is a view of the full parameter
    ("_full_param_padded", Role.UNSHARDED_PARAM),
    ("_full_prec_full_param_padded", Role.UNSHARDED_PARAM),
    ("_local_shard", Role.SHARDED_PARAM),
    ("_mp_shard", Role.ALL_GATHER),
    ("_saved_grad_shard", Role.SHARDED_GRAD),
    ("_cpu_grad", Role.SHARDED_GRAD),
)


class Models:
    """The models and optimizers of this process, and the memory that they hold."""

    def __init__(self, note: Callable[[BaseException, str], None] = lambda *_: None) -> None:
        self._note = note
        self.modules: dict[int, weakref.ref[Any]] = {}
        self.optimizers: dict[int, weakref.ref[Any]] = {}
        self.changed = False
        """True if a model or an optimizer is new, or a model is gone, since the metadata was written."""
        self.order: list[Any] | None = None
        """FSDP2's units as they ran forward, while a trial wants to know; else None."""

    def register_module(self, module: Any) -> bool:
        """Registers a root module, and returns whether it is new.

        Hooks call this at every forward, so it returns at once for a known module.
        """
        registered = self.modules.get(id(module))
        # The id alone is not enough: Python reuses it after the module is gone
        if registered is not None and registered() is module:
            return False
        self.modules[id(module)] = weakref.ref(module, self._note_dropped)
        self.changed = True
        return True

    def _note_dropped(self, _: object) -> None:
        self.changed = True

    def forget(self, modules: Iterable[Any]) -> None:
        """Takes back the registration of *modules*."""
        for module in modules:
            self.changed = self.modules.pop(id(module), None) is not None or self.changed

    def register_optimizer(self, optimizer: Any) -> None:
        """Registers an optimizer. Called before every step, so it returns at once for a known one."""
        registered = self.optimizers.get(id(optimizer))
        if registered is None or registered() is not optimizer:
            self.optimizers[id(optimizer)] = weakref.ref(optimizer)
            self.changed = True

    def live(self) -> tuple[list[Any], list[Any]]:
        """Returns (modules, optimizers) that still exist, and forgets the others."""
        self.modules = {key: ref for key, ref in self.modules.items() if ref() is not None}
        self.optimizers = {key: ref for key, ref in self.optimizers.items() if ref() is not None}
        modules = [ref() for ref in self.modules.values()]
        optimizers = [ref() for ref in self.optimizers.values()]
        return [m for m in modules if m is not None], [o for o in optimizers if o is not None]

    def evaluates(self) -> bool:
        """Returns whether a model is in evaluation mode. Changes nothing: any thread may call it."""
        # A copy: the training thread may register a model meanwhile
        modules = [ref() for ref in list(self.modules.values())]
        return any(getattr(module, "training", True) is False for module in modules)

    def claims(self) -> Claims:
        """Yields (role, tensors) of all models and optimizers. Gathers, moves and keeps nothing.

        The failure of one, for example under another torch, does not affect the others.
        """
        modules, optimizers = self.live()
        of_modules: set[int] = set()
        for module in modules:
            params: list[Any] = []
            try:
                yield from _of_module(module, params)
            except Guard.CAUGHT as error:
                self._note(error, "census of a module")
            of_modules.update(map(id, params))
        for optimizer in optimizers:
            try:
                yield from _of_optimizer(unwrapped_optimizer(optimizer), of_modules)
            except Guard.CAUGHT as error:  # noqa: PERF203
                self._note(error, "census of an optimizer")


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that holds the state, inside ZeroRedundancyOptimizer or another wrapper."""
    for name in ("optim", "optimizer"):
        wrapped = getattr(optimizer, name, None)
        if isinstance(wrapped, torch.optim.Optimizer):
            return wrapped
    return optimizer


# ---- modules --------------------------------------------------------------------------------------


def fsdp2_groups(module: Any) -> Iterator[Any]:
    """Yields the FSDPParamGroups of *module* and its sub-modules."""
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return
    for child in module.modules():
        if hasattr(child, "_get_fsdp_state"):
            yield from param_groups(child._get_fsdp_state())


def param_groups(fsdp_state: Any) -> list[Any]:
    """Returns the FSDPParamGroups of an FSDPState, by the attribute that this torch has."""
    groups = getattr(fsdp_state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(fsdp_state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def fsdp1_handles(module: Any) -> Iterator[Any]:
    """Yields the handles of FSDP1's flat parameters in *module*."""
    for child in module.modules():
        handle = getattr(child, "_handle", None)
        if handle is not None and hasattr(handle, "flat_param"):
            yield handle


def _of_module(module: Any, params: list[Any]) -> Claims:
    """Yields (role, tensors) of *module*, and appends its parameters to *params*."""
    buffers: list[Any] = []
    groups: list[Any] = []
    for child in module.modules():  # one walk for all: a large model has thousands of modules
        # On the class, which fully_shard() replaces: a missing attribute of a module is slow to look up
        if hasattr(type(child), "_get_fsdp_state"):
            groups += param_groups(child._get_fsdp_state())
        attributes = child.__dict__
        handle = attributes.get("_handle")
        if handle is not None and hasattr(handle, "flat_param"):
            yield from _of_fsdp1(handle)
        params += [p for p in attributes["_parameters"].values() if p is not None]
        buffers += [b for b in attributes["_buffers"].values() if b is not None]
    sharded: set[int] = set()
    if groups:
        yield from _of_fsdp2(groups, sharded)
    yield from of_parameters(p for p in params if id(p) not in sharded)
    yield Role.BUFFER, buffers


def _of_fsdp2(groups: list[Any], sharded: set[int]) -> Claims:
    """Yields (role, tensors) of a model's groups, and adds the ids of their parameters to *sharded*."""
    yield from _in_flight(groups)
    shards: list[Any] = []
    second: list[Any] = []
    grads: list[Any] = []
    full_params: list[Any] = []
    full_grads: list[Any] = []
    for group in groups:
        # a sharded group has freed the rest; an unknown state is searched
        is_sharded = getattr(getattr(group, "_sharded_state", None), "name", "") == "SHARDED"
        for param in group.fsdp_params:
            attributes = param.__dict__
            shard = attributes.get("sharded_param")
            sharded.add(id(shard))
            shards.append(attributes.get("_sharded_param_data"))
            if shard is not None and shard.grad is not None:
                grads.append(local_of(shard.grad))
            copy = attributes.get("_sharded_post_forward_param_data")
            if copy is not None:
                second.append(copy)
            grad = attributes.get("unsharded_accumulated_grad")
            if grad is not None:
                full_grads.append(grad)
            if is_sharded:
                continue
            full_params += attributes.get("all_gather_outputs") or ()
            gathered = attributes.get("_unsharded_param")
            if gathered is not None:
                full_params.append(gathered)
                if gathered.grad is not None:
                    full_grads.append(gathered.grad)
    yield Role.SHARDED_PARAM, shards
    yield Role.SHARDED_GRAD, grads
    yield Role.UNSHARDED_PARAM, full_params
    yield Role.SECONDARY_PARAM, second
    yield Role.UNSHARDED_GRAD, full_grads


def _in_flight(groups: list[Any]) -> Claims:
    """Yields the buffers of gathers and reductions that are not freed yet."""
    for group in groups:
        gathered = getattr(group, "_all_gather_result", None)
        if gathered is not None:
            yield Role.ALL_GATHER, getattr(gathered, "all_gather_output", None)
    context = getattr(groups[0], "comm_ctx", None)
    state = getattr(context, "all_gather_state", None)
    if state is not None:
        result = getattr(state, "all_gather_result", None)
        yield Role.ALL_GATHER, getattr(result, "all_gather_output", None)
    # Older versions of torch keep a single state, newer ones a list
    states = getattr(context, "reduce_scatter_states", None)
    single_state = getattr(context, "reduce_scatter_state", None)
    for reduced in states or ([single_state] if single_state is not None else ()):
        yield Role.REDUCE_SCATTER, getattr(reduced, "reduce_scatter_input", None)


def _of_fsdp1(handle: Any) -> Claims:
    flat = handle.flat_param
    is_whole = not getattr(handle, "uses_sharded_strategy", True)
    for name, role in _FLAT:
        if is_whole and role is Role.SHARDED_PARAM:
            role = Role.UNSHARDED_PARAM
        yield role, getattr(flat, name, None)
    grad = flat.grad
    shard = getattr(flat, "_local_shard", None)
    # Under no_sync() FSDP1 accumulates whole gradients of a sharded flat parameter
    is_shard = not is_whole and (grad is None or shard is None or grad.shape == shard.shape)
    yield (Role.SHARDED_GRAD if is_shard else Role.UNSHARDED_GRAD), grad


def of_parameters(params: Iterable[Any]) -> Claims:
    """Yields (role, tensors) of parameters that no wrapper flattened: whole ones and DTensor shards."""
    full_params: list[Any] = []
    shards: list[Any] = []
    grads: list[Any] = []
    shard_grads: list[Any] = []
    for param in params:
        grad = param.grad
        if getattr(type(param), "placements", None) is None:  # no DTensor
            full_params.append(param)
            if grad is not None:
                grads.append(grad)
            continue
        (shards if is_shard(param) else full_params).append(local_of(param))
        if grad is not None:
            (shard_grads if is_shard(grad) else grads).append(local_of(grad))
    yield Role.UNSHARDED_PARAM, full_params
    yield Role.SHARDED_PARAM, shards
    yield Role.UNSHARDED_GRAD, grads
    yield Role.SHARDED_GRAD, shard_grads


def local_of(tensor: Any) -> Any:
    """Returns the part of *tensor* that is in this process."""
    # the type first, because looking up a missing attribute is slow
    return tensor if type(tensor) is torch.Tensor else getattr(tensor, "_local_tensor", tensor)


def is_shard(tensor: Any) -> bool:
    """Returns whether *tensor* is a DTensor of which this process holds a part."""
    return any(p.is_shard() for p in getattr(tensor, "placements", ()))


# ---- optimizers -----------------------------------------------------------------------------------


def _of_optimizer(optimizer: Any, of_modules: set[int]) -> Claims:
    states: list[Any] = []
    for state in getattr(optimizer, "state", {}).values():
        if isinstance(state, dict):  # a step counter has no dimension
            states += [t for t in map(local_of, state.values()) if getattr(t, "ndim", 0)]
    yield Role.OPTIMIZER_STATE, states
    masters: list[Any] = []
    unclaimed: list[Any] = []
    for group in getattr(optimizer, "param_groups", ()):
        for param in group.get("params", ()):
            if id(param) in of_modules:
                continue
            # in no wrapped model: the fp32 master of a model in low precision
            is_master = of_modules and param.dtype == torch.float32 and not is_shard(param)
            (masters if is_master else unclaimed).append(param)
    yield Role.MASTER_PARAM, masters
    yield Role.SHARDED_GRAD, [param.grad for param in masters]
    yield from of_parameters(unclaimed)


# ---- finds models, optimizers and engines that exist already, in a run that stands still --------

ClassName = tuple[str, str]
"""Module and name of a class."""


def find_instances(names: Iterable[ClassName]) -> tuple[dict[ClassName, list[Any]], list[Any]]:
    """Returns the instances of the named classes and their subclasses, and all optimizers.

    A class whose module is not loaded has no instances.
    """
    kinds = {name: _loaded_classes(name) for name in names}
    optimizers = all_subclasses(torch.optim.Optimizer)
    wanted_kinds = optimizers.union(*kinds.values())
    # An instance refers to its class; gc.get_objects() would list every object of the process
    instances = [o for o in gc.get_referrers(*wanted_kinds) if type(o) in wanted_kinds]
    return (
        {name: [o for o in instances if type(o) in kinds[name]] for name in kinds},
        [o for o in instances if type(o) in optimizers and o.param_groups],
    )


def all_subclasses(kind: type) -> set[type]:
    """Returns *kind* and all classes that derive from it."""
    classes: set[type] = set()
    waiting = [kind]
    while waiting:
        subclass = waiting.pop()
        if subclass not in classes:
            classes.add(subclass)
            waiting += type.__subclasses__(subclass)
    return classes


def _loaded_classes(name: ClassName) -> set[type]:
    module, attribute = name
    kind = getattr(sys.modules.get(module), attribute, None)
    return all_subclasses(kind) if isinstance(kind, type) else set()
