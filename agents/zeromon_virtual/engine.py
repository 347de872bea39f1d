"""Runs real torch code on the virtual device: fake tensors, timed kernels, timed collectives.

Inside of :meth:`Engine.running`, whatever torch and FSDP2 do with tensors of the device ``virtual``
advances the clock: kernels in the current stream, collectives on their link, waits where the code waits.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from zeromon_virtual.clock import Clock, Link
from zeromon_virtual.collectives import Collectives
from zeromon_virtual.cost import is_kernel, kernel_ns
from zeromon_virtual.device import NAME, install
from zeromon_virtual.memory import Memory, counted
from zeromon_virtual.spec import DeviceSpec

ROOT = "(root)"
"""The name of the unit of the model itself, whose FQN is empty."""

_PLACES = {
    "unshard": "all-gather",
    "wait_for_unshard": "unsharded param",
    "post_backward": "reduce-scatter",
}
"""Methods of FSDPParamGroup, with what they allocate."""


class Engine:
    """The clock, the memory and the collectives of one virtual run."""

    def __init__(self, device: DeviceSpec, link_of: Callable[[list[int]], Link]) -> None:
        self._device = device
        self._launch_ns = round(device.launch_seconds * 1e9)
        self.clock = install().clock = Clock()
        self.memory = Memory()
        self._infers = False
        self.collectives = Collectives(self.clock, link_of, device.collective_launch_seconds)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Puts what runs inside on the virtual device."""
        with ExitStack() as stack:
            stack.enter_context(counted(self.memory))
            stack.enter_context(self.collectives.patched())
            stack.enter_context(self._named_units())
            stack.enter_context(self._without_inference())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(_Timed(self))
            yield

    def forget(self) -> None:
        """Drops what was measured so far: what follows is a measurement of its own."""
        self.clock.forget()
        self.memory.forget()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Gives what runs inside to the phase *name*."""
        before, self.clock.phase = self.clock.phase, name
        try:
            with self.memory.within(name):
                yield
        finally:
            self.clock.phase = before

    def operator(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Takes the time and the memory of an operator, which returned *out*; returns its result."""
        if self._infers:
            return out
        if func.namespace == "c10d":
            return self.collectives.issue(func, args, kwargs, out)
        if func.namespace == "_c10d_functional":
            self.collectives.issue_functional(func, args, out)
        tensors = [t for t in tree_leaves(out) if _on_device(t)]
        for tensor in tensors:
            self.memory.see(tensor)
        if is_kernel(func) and (tensors or any(map(_on_device, tree_leaves((args, kwargs))))):
            self.clock.delay_host(self._launch_ns)
            name = func.overloadpacket.__name__
            self.clock.run(name, kernel_ns(func, args, kwargs, out, self._device))
        return out

    @contextmanager
    def _without_inference(self) -> Iterator[None]:
        """Leaves out the operators by which DTensor infers the shape of a result."""
        infers = ShardingPropagator._propagate_tensor_meta_non_cached

        @functools.wraps(infers)
        def method(*args: Any, **kwargs: Any) -> Any:
            before, self._infers = self._infers, True
            try:
                return infers(*args, **kwargs)
            finally:
                self._infers = before

        ShardingPropagator._propagate_tensor_meta_non_cached = method
        try:
            yield
        finally:
            ShardingPropagator._propagate_tensor_meta_non_cached = infers

    @contextmanager
    def _named_units(self) -> Iterator[None]:
        """Gives the collectives and the memory of FSDP2 to the unit that issues and allocates them."""
        originals = {name: getattr(FSDPParamGroup, name) for name in _PLACES}
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, self._named(original, _PLACES[name]))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(FSDPParamGroup, name, original)

    def _named(self, original: Any, place: str) -> Any:
        @functools.wraps(original)
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.clock.unit
            self.clock.unit = group._module_fqn or ROOT
            try:
                with self.memory.within(place):
                    return original(group, *args, **kwargs)
            finally:
                self.clock.unit = before

        return method


class _Timed(TorchDispatchMode):  # type: ignore[misc]
    """Shows each operator to the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor: its operators on local tensors follow
        kwargs = kwargs or {}
        return self._engine.operator(func, args, kwargs, func(*args, **kwargs))


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME
