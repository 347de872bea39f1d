"""Counts collectives that C++ issues past the hooks: DDP's reducer, replayed graphs, generated C++.

A group's own sequence number says how many there were. Their operation is known only

* where torch calls a hook at every collective of a group, from :mod:`.dispatched`;
* in the first steps, from the c10d Flight Recorder, which lists each collective;
* for DDP's gradient buckets and what it agrees on beside them, from the backend.

All others are reported as counted, with an unknown operation.
"""

import functools
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from zeromon.ring.codes import ITEM_BYTES, operation_by_name
from zeromon.ring.events import Kind, Op, Phase, Untimed
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.process_groups import Group, sequence_number, text_of
from zeromon_agents.observe import accelerator
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import OFF, HookContext

WARM_UP_STEPS = 3
_MAX_ENTRIES = 400  # a dump costs about 9 us per entry, once, in a warm-up step

Reducers = Callable[[int, int], list[tuple[Op, int, int, int]] | None]
"""Names a number of collectives of a group: see :meth:`~.hooks.backend.Backend.reducers_sent`."""


class UntracedCollectives:
    """Explains, at the end of a step, the sequence numbers that no hook saw."""

    def __init__(self, context: HookContext, collectives: Collectives, reducers: Reducers) -> None:
        self._context = context
        self._collectives = collectives
        self._reducers = reducers
        self.dispatched = Dispatched(context)

    def account(self, step: int) -> None:
        """Writes what C++ has issued since the last call; *step* counts from the start of the agent."""
        pg_map = torch.distributed.distributed_c10d._world.pg_map
        if len(pg_map) > len(self._collectives.groups):
            self._collectives.register_groups()
        flight: list[dict[str, Any]] | None = None
        for group in list(self._collectives.groups.values()):
            pg = group.ref()
            if pg is None:
                continue
            sequence = sequence_number(pg) - group.base
            if sequence < 0:
                continue
            hooked = group.issued + group.extra
            missing = sequence - hooked - group.explained
            if missing > 0:
                self.dispatched.watch(group, pg)
                is_short = sequence + group.base < _MAX_ENTRIES
                early = step <= WARM_UP_STEPS and not accelerator.is_capturing()
                if early and flight is None and is_short:
                    flight = read_flight_recorder()
                self._explain(group, pg, missing, flight)
            shift = group.base if self._collectives.attached else 0
            shifted = sequence + shift, hooked + shift
            self._context.emit(Kind.GROUP_SEQUENCE, *shifted, group=group.id)

    def _explain(self, group: Group, pg: Any, missing: int, flight: list[dict[str, Any]] | None) -> None:
        group.explained += missing
        dispatched = self.dispatched.take(group)
        sent = self._reducers(group.id, missing)
        cause, named = (Untimed.IN_CPP, []) if sent is None else (Untimed.REDUCER, sent)
        if flight:
            listed = self._from_flight_recorder(group, flight, text_of(pg, "group_name"))
            if sum(calls for calls, _ in listed.values()) == missing:
                # the phase in which C++ issues it, as only the number of calls is known
                phases = {Op.ALL_REDUCE: Phase.BACKWARD}
                named = [(op, phases.get(op, Phase.OTHER), *s) for op, s in listed.items()]
        if dispatched and sum(calls for calls, _ in dispatched.values()) == missing:
            named = [(*key, *sums) for key, sums in dispatched.items()]
        if not named:
            named, cause = [(Op.NONE, Phase.OTHER, missing, 0)], Untimed.IN_CPP
        now_ns = time.monotonic_ns()
        for op, phase, calls, nbytes in named:
            # fmt: off
            self._context.write(now_ns, Kind.COUNTED, op, phase, 0, group.id, 0, calls, nbytes, cause, 0)
            # fmt: on

    def _from_flight_recorder(
        self, group: Group, flight: list[dict[str, Any]], name: str | None
    ) -> dict[Op, tuple[int, int]]:
        ours = group.seen_sequences
        if ours is None:
            return {}
        counts: Counter[Op] = Counter()
        nbytes: Counter[Op] = Counter()
        for entry in flight:
            number = entry.get("collective_seq_id", 0)
            group_name = (entry.get("process_group") or ("",))[0]
            if group_name != name or number <= group.base or number in ours or entry.get("is_p2p"):
                continue
            ours.add(number)  # counts once
            op = op_of(str(entry.get("profiling_name", "")))
            counts[op] += 1
            nbytes[op] += payload_bytes(op, entry)
        return {op: (counts[op], nbytes[op]) for op in counts}


def op_of(profiling_name: str) -> Op:
    """Returns the operation of a Flight Recorder name such as ``gloo:all_reduce``."""
    return operation_by_name(profiling_name.rpartition(":")[2])


def payload_bytes(op: Op, entry: dict[str, Any]) -> int:
    """Returns the payload S of a Flight Recorder entry in bytes: the unsharded size."""
    side = "output" if op == Op.ALL_GATHER else "input"
    sizes, dtypes = entry.get(f"{side}_sizes") or [], entry.get(f"{side}_dtypes") or []
    total = 0
    for position, size in enumerate(sizes):
        dtype = dtypes[position] if position < len(dtypes) else (dtypes or ["Byte"])[-1]
        total += math.prod(size) * ITEM_BYTES.get(dtype, 1)
    return total


def read_flight_recorder(*, only_active: bool = False) -> list[dict[str, Any]]:
    """Returns the Flight Recorder's entries without stack traces; [] where it is absent or off.

    torch keeps a recorder per backend: one function dumps NCCL's first one, another those of the other
    backends, since torch 2.14 by the backend's name. torch's C++ makes the pickle in this very call:
    nothing from outside the process is unpickled.
    """
    module = torch._C._distributed_c10d
    of_nccl = getattr(module, "_dump_nccl_trace", None)
    of_others = getattr(module, "_dump_fr_trace", None)
    dumps = [] if of_nccl is None else [of_nccl]
    if of_others is not None:
        by_name = [functools.partial(of_others, backend=name) for name in sorted(_backend_names())]
        dumps += by_name if "backend:" in (of_others.__doc__ or "") else [of_others]
    options = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": only_active}
    contents = [pickle.loads(dump(**options)) for dump in dumps]
    return [entry for dump in contents if isinstance(dump, dict) for entry in dump.get("entries") or []]


def _backend_names() -> set[str]:
    """Returns the backends that this process's groups use, by the names that these give themselves."""
    names = set()
    for pg in list(torch.distributed.distributed_c10d._world.pg_map):
        with suppress(RuntimeError, AttributeError):  # a group that is gone, or of Python's own
            names |= {pg._get_backend(device).name() for device in pg._device_types}
    return names


HOOK_ID = 0x7A65726F6D6F6E
"""Ours among the hooks of a group, which run in the order of their numbers."""

Named = Counter[tuple[Op, int]]
"""(operation, phase) -> calls, and their bytes in a counter of its own."""


class Dispatched:
    """The hooks on the groups, and what they have seen of each."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._asked: set[int] = set()
        """The groups that were watched, also where torch has no such hooks."""
        self._groups: dict[int, Group] = {}
        self._calls: dict[int, Named] = {}
        self._bytes: dict[int, Named] = {}

    def watch(self, group: Group, pg: Any) -> None:
        """Registers the hook on *pg*, once; a torch without such hooks is left alone."""
        if group.id in self._asked:
            return
        self._asked.add(group.id)
        if hasattr(pg, "register_pre_hook"):
            self._calls[group.id], self._bytes[group.id] = Counter(), Counter()
            pg.register_pre_hook(HOOK_ID, self._hook(group))
            self._groups[group.id] = group

    def stop(self) -> None:
        """Removes every hook."""
        for group in self._groups.values():
            pg = group.ref()
            if pg is not None:
                with suppress(RuntimeError):
                    pg.unregister_pre_hook(HOOK_ID)
        self._groups.clear()

    def take(self, group: Group) -> dict[tuple[Op, int], tuple[int, int]]:
        """Returns (operation, phase) -> (calls, bytes) since the last call."""
        calls, nbytes = self._calls.get(group.id), self._bytes.get(group.id)
        if not calls or nbytes is None:
            return {}
        totals = {key: (count, nbytes[key]) for key, count in calls.items()}
        calls.clear()
        nbytes.clear()
        return totals

    def _hook(self, group: Group) -> Callable[[Any], None]:
        context, note = self._context, self._context.guard.note
        calls, nbytes = self._calls[group.id], self._bytes[group.id]
        group.matched = group.issued

        def count_call(args: Any) -> None:
            if context.mode == OFF:
                return
            try:
                if group.issued != group.matched:  # another hook counts this very call
                    if group.matched >= 0:
                        group.matched = group.issued
                    return
                op = operation_by_name(args.name.name)
                key = (op, context.phase)
                calls[key] += 1
                nbytes[key] += _announced_bytes(op, args, group.size)
            except Guard.CAUGHT as error:
                note(error, "pre-hook of a process group")

        return count_call


def _announced_bytes(op: Op, args: Any, size: int) -> int:
    """Returns the payload S: the unsharded bytes."""
    inputs, outputs = (sum(t.nbytes for t in ts) for ts in (args.input_tensors, args.output_tensors))
    if op in (Op.ALL_GATHER, Op.RECV):
        return int(outputs)
    return int(inputs * size if op is Op.GATHER else outputs * size if op is Op.SCATTER else inputs)
