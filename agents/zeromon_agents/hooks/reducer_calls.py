"""Times the all-reduces of DDP's reducer on a device, where torch calls hooks at each collective.

The reducer issues them from C++. Since torch 2.14 a process group calls hooks for those, too. The hook
before a call marks when the gradients of a bucket are computed; the future of its work, for which the
reducer asks as well, when it was reduced. That mark is on a stream of our own, which waits for the work.

A backend may let the compute stream wait as soon as it is asked for the future, as that of torch 2.15
does: what lies between two marks around it is exposed, and nothing else runs meanwhile.
"""

import time
from contextlib import suppress
from typing import Any

from zeromon.ring.events import Flag, Kind, Op, head
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.payloads import DTYPES
from zeromon_agents.hooks.process_groups import Group
from zeromon_agents.observe.buckets import Bucket
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.observe.dispatched import HOOK_ID
from zeromon_agents.runtime.hook_context import OFF, HookContext

_ID = HOOK_ID - 1
"""Before the hook that counts what no other hook has seen."""
_ISSUED = head(Kind.ISSUED, Op.ALL_REDUCE, flags=Flag.ASYNC)
_DONE = head(0, Op.ALL_REDUCE, flags=Flag.ASYNC)


class ReducerCalls:
    """The hooks on the groups of DDP models, and the buckets of the backward under way."""

    def __init__(self, context: HookContext, collectives: Collectives, device: DeviceTimer) -> None:
        self._context, self._collectives, self._device = context, collectives, device
        self._groups: dict[int, Group] = {}
        self._buckets: list[Bucket] | None = None
        """The buckets of the backward under way; None outside of one."""
        self._units: list[int] = []
        self._tensors: list[int] = []
        self._newest: Bucket | None = None
        """The bucket of the call that C++ is in."""
        self._seen: dict[int, int] = {}
        """Group -> the calls that had passed other hooks at the newest one."""

    def watch(self, pg: Any, group: Group) -> None:
        """Registers the hooks on *pg*, once; a torch without such hooks is left alone."""
        if group.id not in self._groups and hasattr(pg, "register_post_hook"):
            self._groups[group.id] = group
            guarded = self._context.guard.guarded
            pg.register_pre_hook(_ID, guarded(lambda call: self._before(group, call)))
            pg.register_post_hook(_ID, guarded(self._after))

    def stop(self) -> None:
        """Removes the hooks."""
        for group in self._groups.values():
            pg = group.ref()
            if pg is not None:
                with suppress(RuntimeError):
                    pg.unregister_pre_hook(_ID)
                    pg.unregister_post_hook(_ID)
        self._groups.clear()

    def begin(self, units: list[int], tensors: list[int]) -> None:
        """A backward begins that reduces buckets with these *units* and numbers of *tensors*."""
        self._buckets, self._newest = [], None
        self._units, self._tensors = units, tensors
        self._seen = {number: group.issued for number, group in self._groups.items()}

    def end(self) -> list[Bucket]:
        """Returns the buckets of the backward that ends."""
        buckets, self._buckets = self._buckets or [], None
        return buckets

    def _before(self, group: Group, call: Any) -> None:
        self._newest = None
        if self._buckets is None or self._context.mode == OFF:
            return
        if group.issued != self._seen.get(
            group.id
        ):  # Python issued it, as a communication hook does
            self._seen[group.id] = group.issued
            return
        if call.name.name != "ALLREDUCE" or not call.async_op:
            return
        ready = self._device.mark()
        if ready is None:
            return
        context, number = self._context, len(self._buckets)
        sequence = self._collectives.number_next(group)
        self._seen[group.id] = group.issued
        nbytes = sum(tensor.nbytes for tensor in call.input_tensors)
        dtype = DTYPES[call.input_tensors[0].dtype]
        place = group.id | (self._units[number] if number < len(self._units) else 0)
        issued_ns = time.monotonic_ns()
        issued = _ISSUED | context.head_word
        context.ring.write(issued_ns, issued, place, nbytes, sequence, dtype, context.engine)
        entry = [_DONE | context.head_word, place, nbytes, issued_ns, sequence, 0, ready, 0]
        self._newest = Bucket(entry, self._tensors[number] if number < len(self._tensors) else 1)
        self._buckets.append(self._newest)

    def _after(self, call: Any) -> None:
        bucket, self._newest = self._newest, None
        if bucket is None or call.work is None:
            return
        future = call.work.get_future()
        bucket.left = self._device.mark()
        bucket.end = self._device.mark_end(future)
