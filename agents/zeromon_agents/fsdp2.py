"""FSDP2 (``fully_shard``): units, their unshard and reshard, and forward.

Private names of torch live here and nowhere else; each has a canary test. The methods of
FSDPParamGroup are looked up on the instance at every call, so patching the class works at any time,
and they run outside of compiled regions, so no graph breaks.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from zeromon.events import Kind, Op, UnitEvent
from zeromon_agents.allocator import allocated_bytes
from zeromon_agents.guard import Guard
from zeromon_agents.patches import Patches
from zeromon_agents.pending import DeviceTimer
from zeromon_agents.recorder import ON, Recorder
from zeromon_agents.step import Steps

PARAM_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


SawModule = Callable[[Any], None]


class Units:
    """Writes what happens to units; shared by FSDP1 and FSDP2."""

    def __init__(self, recorder: Recorder, device: DeviceTimer) -> None:
        self.recorder = recorder
        self.device = device
        self._marked: list[weakref.ref[Any]] = []

    def known(self, owner: Any) -> int:
        """The id under which *owner* is known as a unit; 0 for none yet."""
        known = getattr(owner, "_zeromon_unit", None)
        return int(known[1]) if known is not None and known[0] is self.recorder else 0

    def learn(self, owner: Any, number: int) -> int:
        """Keeps *number* at *owner*, where it costs least to find."""
        owner._zeromon_unit = (self.recorder, number)
        self._marked.append(weakref.ref(owner))
        return number

    def stop(self) -> None:
        """Takes what was kept at the units away."""
        for owner in (ref() for ref in self._marked):
            if owner is not None and getattr(owner, "_zeromon_unit", (None,))[0] is self.recorder:
                del owner._zeromon_unit
        self._marked.clear()

    def mark(self, event: UnitEvent, unit: int, blocked_ns: int = 0) -> None:
        """A unit record of now; with the allocated bytes on detailed steps."""
        recorder = self.recorder
        allocated = allocated_bytes() if recorder.detailed else -1
        # fmt: off
        recorder.write(time.monotonic_ns(), Kind.UNIT, event, recorder.phase, 0, 0, unit,
                       blocked_ns, allocated, 0, 0)
        # fmt: on

    def within(
        self,
        unit_of: Callable[[Any], int],
        event: UnitEvent | None,
        happens: Callable[..., bool] = lambda *_: True,
    ) -> Any:
        """A decorator for a method of a unit: its collectives are the unit's.

        *happens* gets the arguments of the call and says whether it will do what *event* says.
        """
        recorder = self.recorder

        def decorate(original: Any, subject: int = 0) -> Any:
            @functools.wraps(original)
            def method(*args: Any, **kwargs: Any) -> Any:
                if recorder.mode != ON:
                    return original(*args, **kwargs)
                outer = recorder.unit
                try:
                    recorder.unit = unit = unit_of(args[subject])
                    if event is not None and happens(*args):
                        self.mark(event, unit)
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, original.__name__)
                try:
                    return original(*args, **kwargs)
                finally:
                    recorder.unit = outer

            return method

        return decorate


class Fsdp2:
    """The hooks on FSDPParamGroup and FSDPState."""

    def __init__(self, units: Units, steps: Steps, patches: Patches, saw_root: SawModule) -> None:
        self._saw_root = saw_root
        self._units = units
        self._recorder = units.recorder
        self._steps = steps
        self._patches = patches

    def watch_param_group(self, module: Any) -> None:
        """Patches FSDPParamGroup of *module*."""
        group = module.FSDPParamGroup
        unshard = self._units.within(self.unit_of, None)
        patches = self._patches
        patches.set(group, "unshard", self._unshard_hook(patches.original(group, "unshard")))
        original = patches.original(group, "wait_for_unshard")
        patches.set(group, "wait_for_unshard", self._wait_hook(original))
        reshard = self._units.within(self.unit_of, UnitEvent.RESHARD, will_reshard)
        patches.set(group, "reshard", reshard(patches.original(group, "reshard")))
        for name in ("post_backward", "finalize_backward"):
            patches.set(group, name, unshard(patches.original(group, name)))
        original = patches.original(group, "post_forward")
        patches.set(group, "post_forward", self._post_forward_hook(original))

    def watch_state(self, module: Any) -> None:
        """Patches FSDPState of *module*: its root starts the forward."""
        state = module.FSDPState
        original = self._patches.original(state, "_root_pre_forward")
        steps, recorder, timer = self._steps, self._recorder, self._units.device

        @functools.wraps(original)
        def _root_pre_forward(fsdp_state: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.mode:
                try:
                    if fsdp_state._state_ctx.iter_forward_root is None:
                        self._saw_root(module)
                        timer.mark_compute_stream()
                        steps.forward_begins()
                        self._strategy(fsdp_state)
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "_root_pre_forward")
            return original(fsdp_state, module, *args, **kwargs)

        self._patches.set(state, "_root_pre_forward", _root_pre_forward)

    _told_strategy = False

    def _strategy(self, fsdp_state: Any) -> None:
        if self._told_strategy:
            return
        self._told_strategy = True
        reshards = bool(getattr(fsdp_state, "_auto_reshard_after_forward", True))
        group = next(iter(param_groups(fsdp_state)), None)
        if group is not None and not reshards:
            info = getattr(group, "post_forward_mesh_info", None)
            reshards = info is not None
        self._recorder.meta(strategy="fsdp2" if reshards else "fsdp2-zero2")

    def unit_of(self, group: Any) -> int:
        """The id of the unit that *group* is."""
        known = self._units.known(group)
        if known:
            return known
        fqn = getattr(group, "_module_fqn", None)
        if fqn is None:
            return 0  # before lazy init; it will have its name at the next call
        facts = {
            "params": len(group.fsdp_params),
            "kind": "fsdp2",
            "nbytes": sum(map(_unsharded_bytes, group.fsdp_params)),
        }
        number = self._recorder.unit_id(fqn or "(root)", facts)
        return self._units.learn(group, number)

    def _unshard_hook(self, original: Any) -> Any:
        recorder, units = self._recorder, self._units

        @functools.wraps(original)
        def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.mode != ON:
                return original(group, *args, **kwargs)
            outer, begun = recorder.unit, True
            try:
                begun = group._all_gather_result is not None
                recorder.unit = self.unit_of(group)
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "unshard")
            try:
                result = original(group, *args, **kwargs)
            finally:
                unit, recorder.unit = recorder.unit, outer
            try:
                if not begun and group._all_gather_result is not None:
                    units.mark(UnitEvent.UNSHARD, unit)
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "unshard")
            return result

        return unshard

    def _wait_hook(self, original: Any) -> Any:
        recorder, units = self._recorder, self._units

        @functools.wraps(original)
        def wait_for_unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.mode != ON or getattr(group, "_all_gather_result", None) is None:
                return original(group, *args, **kwargs)
            outer, reached = recorder.unit, time.monotonic_ns()
            try:
                recorder.unit = self.unit_of(group)
                event = group._all_gather_result.all_gather_event
                if event is not None and group.device.type == "cuda":
                    # the stream will wait for this very event first thing in the call below
                    stream = group.device_handle.current_stream()
                    units.device.stall(Op.ALL_GATHER, lambda: stream.wait_event(event))
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "wait_for_unshard")
            try:
                return original(group, *args, **kwargs)
            finally:
                try:
                    blocked = time.monotonic_ns() - reached
                    units.mark(UnitEvent.WAIT_UNSHARD, recorder.unit, blocked)
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "wait_for_unshard")
                recorder.unit = outer

        return wait_for_unshard

    def _post_forward_hook(self, original: Any) -> Any:
        steps, recorder = self._steps, self._recorder

        @functools.wraps(original)
        def post_forward(group: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if recorder.mode:
                    steps.forward_seen()
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "post_forward")
            return original(group, *args, **kwargs)

        return post_forward


def will_reshard(group: Any, *_: Any) -> bool:
    """Whether ``reshard`` frees anything: after forward not every unit is freed."""
    in_forward = getattr(getattr(group, "_training_state", None), "name", "") == "FORWARD"
    return not in_forward or bool(getattr(group, "_reshard_after_forward", True))


def _unsharded_bytes(param: Any) -> int:
    """Bytes of a parameter while it is gathered."""
    dtype = getattr(param, "param_dtype", None) or getattr(param, "orig_dtype", torch.float32)
    return int(math.prod(param._orig_size) * dtype.itemsize)


def param_groups(fsdp_state: Any) -> list[Any]:
    """The param groups of a state, under the name that this torch has."""
    groups = getattr(fsdp_state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(fsdp_state, "_fsdp_param_group", None)
    return [] if group is None else [group]
