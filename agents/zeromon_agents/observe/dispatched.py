"""Names collectives that C++ issues, where torch calls a hook at every collective of a group.

Since torch 2.14 the dispatcher calls ``ProcessGroup.register_pre_hook`` for DDP's reducer and generated
C++ code, too. It gives the operation and the tensors, not when the caller waits: such collectives have a
name, bytes and a phase, and no times. The call costs some microseconds, so only a group gets the hook on
which something has passed the other hooks.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from zeromon.ring.codes import operation_named
from zeromon.ring.events import Op
from zeromon_agents.hooks.process_groups import Group
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import OFF, HookContext

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
        found = {key: (count, nbytes[key]) for key, count in calls.items()}
        calls.clear()
        nbytes.clear()
        return found

    def _hook(self, group: Group) -> Callable[[Any], None]:
        context, note = self._context, self._context.guard.note
        calls, nbytes = self._calls[group.id], self._bytes[group.id]
        group.matched = group.issued

        def before(args: Any) -> None:
            if context.mode == OFF:
                return
            try:
                if group.issued != group.matched:  # another hook counts this very call
                    if group.matched >= 0:
                        group.matched = group.issued
                    return
                op = operation_named(args.name.name)
                key = (op, context.phase)
                calls[key] += 1
                nbytes[key] += _payload(op, args, group.size)
            except Guard.CAUGHT as error:
                note(error, "pre-hook of a process group")

        return before


def _payload(op: Op, args: Any, size: int) -> int:
    """Returns the payload S: the unsharded bytes."""
    inputs, outputs = (
        sum(t.nbytes for t in ts) for ts in (args.input_tensors, args.output_tensors)
    )
    if op in (Op.ALL_GATHER, Op.RECV):
        return int(outputs)
    return int(inputs * size if op is Op.GATHER else outputs * size if op is Op.SCATTER else inputs)
