"""The training frameworks that the agent knows. A new framework is one line in :data:`BACKENDS`."""

from collections.abc import Callable, Iterable
from typing import Any

from zeromon.ring.model_metadata import ModelMetadata
from zeromon_agents.hooks.activities import Activities
from zeromon_agents.hooks.backend import Backend, FromCpp, Services
from zeromon_agents.hooks.ddp import Ddp, ZeroRedundancy
from zeromon_agents.hooks.deepspeed.backend import DeepSpeed
from zeromon_agents.hooks.dimensions import Dimensions
from zeromon_agents.hooks.fsdp1 import Fsdp1
from zeromon_agents.hooks.fsdp2 import Fsdp2
from zeromon_agents.hooks.loggers import Loggers
from zeromon_agents.hooks.pipelining import Pipelining
from zeromon_agents.hooks.symmetric_memory import SymmetricMemory
from zeromon_agents.observe import model_metadata
from zeromon_agents.observe.census import Provider
from zeromon_agents.observe.torch_roles import find_instances
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.imports import ImportWatch

BACKENDS: tuple[type[Backend], ...] = (
    Fsdp2,
    Fsdp1,
    Ddp,
    DeepSpeed,
    ZeroRedundancy,
    Dimensions,
    Pipelining,
    SymmetricMemory,
    Activities,
    Loggers,
)
"""Where two backends know a model, a process group or a bucket, the first one describes it."""


class Backends:
    """One instance of each backend, and the calls to all of them."""

    def __init__(self, services: Services) -> None:
        self._guard: Guard = services.context.guard
        self._models, self._steps = services.models, services.steps
        self._all = tuple(make(services) for make in BACKENDS)
        self.ends, self.looks = self._own("end_step"), self._own("look")
        self._reducers = self._own("reducers_sent")

    def _own(self, name: str) -> tuple[Callable[..., Any], ...]:
        """The method *name* of the backends that have one of their own."""
        # Each step calls these: a method that no backend overrides would cost a call for nothing
        overriding = (b for b in self._all if getattr(type(b), name) is not getattr(Backend, name))
        return tuple(getattr(b, name) for b in overriding)

    def install(self, imports: ImportWatch) -> None:
        """Patches the modules that are loaded, and the others as soon as they are imported."""
        for backend in self._all:
            for module, patch in backend.hooks():
                # Guarded: an error in a patch would fail the script's import of the framework
                imports.when_imported(module, self._guard.guarded(patch))

    def stop(self) -> None:
        """Stops all backends."""
        for backend in self._all:
            self._guard.guarded(backend.stop)()

    def group_label(self, pg: Any) -> str:
        """Returns the name that a framework gave to the process group *pg*; "" without one."""
        return next((label for b in self._all if (label := b.group_label(pg))), "")

    def reducers_sent(self, group: int, calls: int) -> list[FromCpp] | None:
        """Names *calls* collectives that C++ issued on *group*; None where no reducer has it."""
        for reducers_sent in self._reducers:  # without a generator: this runs at each step
            named: list[FromCpp] | None = reducers_sent(group, calls)
            if named is not None:
                return named
        return None

    def providers(self) -> Iterable[Provider]:
        """Returns the backends' providers for the memory census."""
        return [provider for backend in self._all for provider in backend.roles()]

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata of the models and optimizers that exist."""
        modules, optimizers = self._models.live()
        metadata: dict[str, Any] = {}
        if optimizers:
            metadata["optimizer"] = type(optimizers[0]).__name__
        for backend in self._all:
            metadata.update(backend.rank_metadata(optimizers))
        models = [self._model_metadata(module, optimizers) for module in modules]
        metadata["models"] = [model for model in models if model is not None]
        return metadata

    def _model_metadata(self, module: Any, optimizers: list[Any]) -> ModelMetadata | None:
        """Asks each backend; a module that none describes is whole on every rank, as under DDP."""
        described_by = (backend.model_metadata(module, optimizers) for backend in self._all)
        described = next((model for model in described_by if model is not None), None)
        described = described or model_metadata.of_replicated(module, optimizers)
        if described is not None and self._steps.updates_in_backward:
            return {**described, "updates_in_backward": True}
        return described

    def register_existing(self) -> None:
        """Registers the models, optimizers and engines that existed before the agent was attached."""
        objects, optimizers = find_instances(name for backend in self._all for name in backend.classes)
        for backend in self._all:
            for instance in (entry for name in backend.classes for entry in objects.get(name, ())):
                backend.adopt(instance)
        for optimizer in optimizers:
            self._models.register_optimizer(optimizer)
