"""Writes what happens to units (FSDP param groups, flat parameters, ZeRO sub-modules, buckets)."""

import time
import weakref
from collections.abc import Callable
from typing import Any

from zeromon.ring.events import Kind, UnitEvent
from zeromon_agents.observe.allocator import allocated_bytes
from zeromon_agents.runtime.around import around, leave_to_python
from zeromon_agents.runtime.hook_context import ON, HookContext

Describe = Callable[[Any], "tuple[str, dict[str, Any]] | None"]
"""Returns the name and the description of the unit that an object owns; None without one."""


class Units:
    """Keeps each unit's id at the object that owns the unit, and writes unit records."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._owners: list[weakref.ref[Any]] = []

    def id_of(self, owner: Any, describe: Describe) -> int:
        """Returns the id of the unit that *owner* owns, as ``unit_id``, kept at *owner*: found fastest.

        *describe* names a new unit. It returns None for an owner without a unit, whose id is 0.
        """
        kept = getattr(owner, "_zeromon_unit", None)
        if kept is not None and kept[0] is self._context:
            return int(kept[1])
        described = describe(owner)
        if described is None:
            return 0
        number = self._context.unit_id(*described)
        owner._zeromon_unit = (self._context, number)
        self._owners.append(weakref.ref(owner))
        return number

    def stop(self) -> None:
        """Removes the ids from their owners."""
        for owner in (ref() for ref in self._owners):
            if owner is not None and getattr(owner, "_zeromon_unit", (None,))[0] is self._context:
                del owner._zeromon_unit
        self._owners.clear()

    def mark(self, event: UnitEvent, unit: int, blocked_ns: int = 0) -> None:
        """Writes a unit record of now, with the allocated bytes in detailed steps."""
        context = self._context
        allocated = allocated_bytes() if context.detailed else -1
        # fmt: off
        context.write(time.monotonic_ns(), Kind.UNIT, event, context.phase, 0, 0, unit,
                      blocked_ns, allocated, 0, 0)
        # fmt: on

    def within(
        self,
        describe: Describe,
        event: UnitEvent | None = None,
        happens: Callable[..., bool] | None = None,
        subject: int = 0,
    ) -> Callable[[Any], Any]:
        """Returns a wrapper for a function whose collectives belong to the unit of an argument.

        *subject* is the position of the argument that *describe* takes. An *event* is written when
        *happens*, called with the positional arguments, returns True; always where it is None.
        """
        context = self._context

        def enter(*args: Any, **_: Any) -> None:
            owner = args[subject]
            kept = getattr(owner, "_zeromon_unit", None)  # as id_of, without the call
            if kept is not None and kept[0] is context:
                context.unit = unit = kept[1]
            else:
                context.unit = unit = self.id_of(owner, describe)
            if event is not None and (happens is None or happens(*args)):
                self.mark(event, unit)

        leave_to_python(
            happens, and_callees=True
        )  # before torch 2.7 a frame does not leave its callees
        hook = around(context, enter, scoped=True, active_from=ON, traced=True)
        return lambda original: leave_to_python(hook(original), and_callees=False)
