"""What a training framework is to the agent: its hooks, its objects, its metadata and its memory.

A framework is one :class:`Backend` subclass in a module of its own, and one line in
:data:`zeromon_agents.hooks.backends.BACKENDS`.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zeromon.ring.events import Op
from zeromon.ring.model_metadata import ModelMetadata
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.units import Units
from zeromon_agents.observe.census import Census, Provider
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.observe.offload import Transfers
from zeromon_agents.observe.scalars import Scalars
from zeromon_agents.observe.step import Steps
from zeromon_agents.observe.torch_roles import Models
from zeromon_agents.runtime.hook_context import HookContext
from zeromon_agents.runtime.patches import Patches

ImportHook = tuple[str, Callable[[Any], None]]
"""The name of a module, and what patches the module once it is loaded."""

FromCpp = tuple[Op, int, int, int]
"""Collectives that C++ issued: operation, phase, calls and bytes."""


class Services(NamedTuple):
    """What the agent shares with its backends."""

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


class Backend:
    """One training framework. A subclass overrides the methods that apply to it.

    No method may import the framework: the agent calls :meth:`hooks` before the script has decided which
    frameworks it uses. The agent guards each call, so a backend may raise.
    """

    classes: tuple[tuple[str, str], ...] = ()
    """(module, class) of the objects that :meth:`adopt` takes when the agent is attached to a run."""

    def __init__(self, services: Services) -> None:
        self.context = services.context
        self.patches = services.patches
        self.steps = services.steps
        self.collectives = services.collectives
        self.device = services.device
        self.models = services.models
        self.census = services.census
        self.units = services.units
        self.transfers = services.transfers
        self.scalars = services.scalars

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
