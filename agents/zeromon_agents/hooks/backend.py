"""A training framework as the agent knows it: its hooks, its objects, its metadata and its memory.

A framework is one :class:`Backend` subclass in a module of its own, and one line in
:data:`zeromon_agents.hooks.backends.BACKENDS`.
"""

import functools
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from zeromon.ring.codes import Kind, Op, UnitEvent
from zeromon.ring.model_metadata import ModelMetadata
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.observe.allocator import allocated_bytes
from zeromon_agents.observe.census import Census, Provider
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.observe.offload import Transfers
from zeromon_agents.observe.scalars import Scalars
from zeromon_agents.observe.step import Steps
from zeromon_agents.observe.torch_roles import Models
from zeromon_agents.runtime.around import Patches, UnitEntry, around, leave_to_python
from zeromon_agents.runtime.hook_context import ON, HookContext

Describe = Callable[[Any], "tuple[str, dict[str, Any]] | None"]
"""Returns the name and the description of the unit that an object owns; None without one."""


UNIT_ATTRIBUTE = "_zeromon_unit"
"""Context and id of the unit, at the object that owns it; compiled_hooks.c reads it, too."""


class Units:
    """Keeps each unit's id at the object that owns the unit, and writes unit records."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._owners: list[weakref.ref[Any]] = []
        self.mark: Callable[..., None] = self._mark
        """``mark(event, unit, blocked_ns=0)`` writes a unit record of now."""
        if context.recorder is not None:
            self.mark = functools.partial(context.recorder.mark, context, self._mark)

    def id_of(self, owner: Any, describe: Describe) -> int:
        """Returns the id of the unit that *owner* owns, as ``unit_id``, kept at *owner*: found fastest.

        *describe* names a new unit. It returns None for an owner without a unit, whose id is 0.
        """
        context, unit = getattr(owner, UNIT_ATTRIBUTE, (None, 0))
        # With another context, the id is of the ring of a stopped agent
        if context is self._context:
            return int(unit)
        described = describe(owner)
        if described is None:
            return 0
        number = self._context.unit_id(*described)
        setattr(owner, UNIT_ATTRIBUTE, (self._context, number))
        self._owners.append(weakref.ref(owner))
        return number

    def stop(self) -> None:
        """Removes the ids from their owners."""
        for owner in (ref() for ref in self._owners):
            if owner is not None and getattr(owner, UNIT_ATTRIBUTE, (None,))[0] is self._context:
                delattr(owner, UNIT_ATTRIBUTE)
        self._owners.clear()

    def _mark(self, event: UnitEvent, unit: int, blocked_ns: int = 0) -> None:
        """Writes it with the allocated bytes in detailed steps."""
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
        traced: bool = True,
    ) -> Callable[[Any], Any]:
        """Returns a wrapper for a function whose collectives belong to the unit of an argument.

        *subject* is the position of the argument that *describe* takes. An *event* is written when
        *happens*, called with the positional arguments, returns True; always where it is None.
        *traced* as for :func:`around`.
        """
        context = self._context

        def enter_unit(*args: Any, **_: Any) -> None:
            owner = args[subject]
            known_by, unit = getattr(owner, UNIT_ATTRIBUTE, (None, 0))  # as id_of, without the call
            context.unit = unit = unit if known_by is context else self.id_of(owner, describe)
            if event is not None and (happens is None or happens(*args)):
                self.mark(event, unit)

        # before torch 2.7 a frame does not leave its callees
        leave_to_python(happens, and_callees=True)
        entry = UnitEntry(subject, -1 if event is None else int(event), happens)
        hook = around(context, enter_unit, scoped=True, active_from=ON, traced=traced, unit_entry=entry)
        return lambda original: leave_to_python(hook(original), and_callees=False)


ImportHook = tuple[str, Callable[[Any], None]]
"""The name of a module, and what patches the module once it is loaded."""

FromCpp = tuple[Op, int, int, int]
"""Collectives that C++ issued: operation, phase, calls and bytes."""


@dataclass(eq=False)
class Services:
    """The objects that the agent shares with its backends."""

    context: HookContext
    patches: Patches
    steps: Steps
    collectives: Collectives
    device: DeviceTimer
    models: Models
    census: Census
    units: Units
    transfers: Transfers
    scalars: Scalars


class Backend(Services):
    """One training framework. A subclass overrides the methods that apply to it.

    No method may import the framework: the agent calls :meth:`hooks` before the script has decided which
    frameworks it uses. The agent guards each call, so a backend may raise.
    """

    classes: tuple[tuple[str, str], ...] = ()
    """(module, class) of the objects that :meth:`adopt` takes when the agent is attached to a run."""

    def __init__(self, services: Services) -> None:
        super().__init__(**vars(services))

    def wrap(self, owner: Any, name: str, *hooks: Any, **options: Any) -> None:
        """Wraps *owner*.*name*; *hooks* and *options* are those of :func:`around`."""
        self.patches.wrap(owner, name, around(self.context, *hooks, **options))

    def hooks(self) -> Iterable[ImportHook]:
        """Returns the modules to patch, each with the function that patches it."""
        return ()

    def adopt(self, instance: Any) -> None:
        """Registers an instance of :attr:`classes` that existed before the agent was attached."""

    def rank_metadata(self, optimizers: list[Any]) -> dict[str, Any]:
        """Returns metadata of this rank that depends on the *optimizers* of the script."""
        return {}

    def model_metadata(self, module: Any, optimizers: list[Any]) -> ModelMetadata | None:
        """Returns the metadata of a registered root *module*; None for another backend's module."""
        return None

    def roles(self) -> Iterable[Provider]:
        """Returns providers for the memory census, beyond the one of torch modules and optimizers.

        A provider that fails three times is left out; the other providers are not affected.
        """
        return ()

    def group_label(self, pg: Any) -> str:
        """Returns the framework's name of the process group *pg*; "" for a group of another."""
        return ""

    def reducers_sent(self, group: int, calls: int) -> list[FromCpp] | None:
        """Names *calls* collectives that C++ issued on *group* in a step; [] where they are unknown.

        None: the backend issues none on this group.
        """
        return None

    def end_step(self) -> None:
        """Runs at the end of each step, control steps included, and before the counts end."""

    def look(self) -> None:
        """Looks for what is new: see :meth:`~.runtime.agent.Agent._look`. Also before groups end."""

    def stop(self) -> None:
        """Undoes what the backend changed besides patches."""
