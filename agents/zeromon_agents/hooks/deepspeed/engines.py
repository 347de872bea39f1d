"""The DeepSpeed engines of this process: number, stage, offload, units, and their metadata."""

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Offload, Strategy, deepspeed_strategy
from zeromon_agents.observe import model_metadata, zero_roles
from zeromon_agents.observe.census import Claims, Provider
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import HookContext

NO_OFFLOAD = "none"


class SubModule(NamedTuple):
    """A module that holds parameters of an engine of stage 3."""

    unit: int = 0
    engine: int = 0
    parameters: tuple[int, ...] = ()
    """The ds_id of each parameter that is gathered with it."""


_NONE = SubModule()


class Engine:
    """The state that the hooks keep of one DeepSpeed engine, without keeping the engine alive."""

    def __init__(self, number: int, engine: Any, forget: Callable[[Any], Any]) -> None:
        self.number = number
        self.ref = weakref.ref(engine, forget)
        self.stage = int(engine.zero_optimization_stage())
        zero = engine._config.zero_config
        self.optimizer_on = _offload_device(zero.offload_optimizer)
        self.params_on = _offload_device(zero.offload_param)
        self.plus_plus = bool(
            zero.zero_hpz_partition_size > 1
            or zero.zero_quantized_weights
            or zero.zero_quantized_gradients
        )
        self.hybrid = zero.zero_hpz_partition_size > 1 or int(getattr(zero, "mics_shard_size", -1)) > 0
        self.bucket = 0
        """Buckets reduced since the forward began."""
        self.optimizer_id = id(engine.optimizer)
        self.modules: list[int] = []
        """The id() of its sub-modules."""
        self.owners: dict[int, int] = {}
        """ds_id of a parameter -> unit of the sub-module that holds it."""

    def claims(self) -> Claims:
        """Yields (memory role, tensors) of the engine; nothing once the engine is gone."""
        engine = self.ref()
        return () if engine is None else zero_roles.zero_claims(engine)

    @property
    def prefix(self) -> str:
        """The prefix of the names of this engine's units, so that two engines' units differ."""
        return "" if self.number == 1 else f"engine{self.number}:"

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer steps on the host."""
        return self.optimizer_on != NO_OFFLOAD

    @property
    def offloads_params(self) -> bool:
        """True if parameters live on the host or on NVMe."""
        return self.params_on != NO_OFFLOAD

    @property
    def strategy(self) -> Strategy:
        """How the engine shards its model, and where it keeps what it offloads."""
        return deepspeed_strategy(
            self.stage,
            offload=offload_of(self.optimizer_on, self.params_on),
            hybrid=self.hybrid,
            plus_plus=self.plus_plus,
        )


class Engines:
    """Registers engines, and finds them by engine, optimizer, or sub-module."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._engines: dict[int, Engine] = {}
        self._modules: dict[int, SubModule] = {}
        """id(sub-module) -> what the hooks know of it; looked up more than a hundred times a step."""
        self._count = 0
        self._dropped: list[Engine] = []
        """Engines that the script has let go of and whose end is not written yet."""
        self.built_bytes: dict[int, int | None] = {}
        """id(engine) -> bytes that its rank built before they were divided; None where unknown."""
        self.missing: list[str] = []
        """Methods that this version of DeepSpeed lacks: their hooks are not installed."""

    def of(self, engine: Any) -> Engine:
        """Returns the record of *engine*, registering it at first sight."""
        record = self._engines.get(id(engine))
        if record is None or record.ref() is not engine:
            record = self._register(engine)
        return record

    def by_optimizer(self, optimizer: Any) -> Engine | None:
        """Returns the engine that *optimizer* belongs to."""
        owners = (e for e in self._engines.values() if e.optimizer_id == id(optimizer))
        return next(owners, None)

    def by_parameter(self, ds_id: int) -> Engine | None:
        """Returns the engine whose parameter has the number *ds_id*."""
        return next((e for e in self._engines.values() if ds_id in e.owners), None)

    def providers(self) -> list[Provider]:
        """Returns what gives the memory census each engine's tensors."""
        return [record.claims for record in self._engines.values()]

    def sub_module(self, module: Any) -> SubModule:
        """Returns what is known of *module*; its unit is 0 without parameters."""
        return self._modules.get(id(module), _NONE)

    def _register(self, engine: Any) -> Engine:
        key = id(engine)
        self._forget(key)
        self._count += 1
        record = Engine(self._count, engine, lambda _: self._forget(key))
        self._engines[key] = record
        if record.stage == 3:
            self._name_units(engine, record)
        self._write_metadata(engine, record)
        return record

    def _forget(self, key: int) -> None:
        dropped = self._engines.pop(key, None)
        if dropped is not None:
            self._dropped.append(dropped)
            for module in dropped.modules:
                self._modules.pop(module, None)

    def write_dropped(self) -> None:
        """Writes which engines are gone, in place of their models and settings, once there is another.

        The last one stays what the run trained. The garbage collector may run anywhere, so what it calls
        only remembers them.
        """
        while self._dropped and self._engines:
            dropped = self._dropped.pop()
            facts = {"stage": dropped.stage, **dropped.strategy.metadata(), "dropped": True}
            self._context.add_metadata(**{f"engine{dropped.number}": facts})

    def _name_units(self, engine: Any, record: Engine) -> None:
        for fqn, module in engine.module.named_modules():
            params = own_parameters(module)
            if not params:
                continue
            described = {"params": len(params), "kind": "zero3", "engine": record.number}
            unit = self._context.unit_id(record.prefix + (fqn or "(root)"), described)
            ds_ids = tuple(getattr(param, "ds_id", -1) for param in params)
            if id(module) not in self._modules:
                record.modules.append(id(module))
                self._modules[id(module)] = SubModule(unit, record.number, ds_ids)
            for ds_id in ds_ids:
                record.owners.setdefault(ds_id, unit)

    def _write_metadata(self, engine: Any, record: Engine) -> None:
        metadata: dict[str, Any] = {"stage": record.stage, **record.strategy.metadata()}
        try:
            metadata["settings"] = zero_roles.engine_settings(engine)
        except Guard.CAUGHT as error:  # another version's configuration: shown as unknown
            self._context.guard.note(error, "settings")
        try:
            metadata["model"] = engine_model(engine, self.built_bytes.pop(id(engine), None))
        except Guard.CAUGHT as error:  # likewise: no prediction then
            self._context.guard.note(error, "model metadata")
        for section in ("offload_optimizer", "offload_param"):
            path = getattr(getattr(engine._config.zero_config, section), "nvme_path", None)
            if path is not None:
                metadata["disk_path"] = os.path.abspath(path)
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._context.add_metadata(
            **record.strategy.metadata(),
            optimizer=type(inner).__name__,
            deepspeed=getattr(sys.modules.get("deepspeed"), "__version__", ""),
            unseen=self.missing,
            **{f"engine{record.number}": metadata},
        )


def own_parameters(module: Any) -> list[Any]:
    """Returns the parameters that ZeRO-3 gathers with *module*: its own; of a leaf module, all.

    It runs at the release of every module: ``parameters()``, and ``getattr`` for what a module lacks,
    take microseconds.
    """
    if "_z3_leaf" in vars(module) and module._z3_leaf:
        return list(module.parameters())
    return [param for param in dict.fromkeys(module._parameters.values()) if param is not None]


def engine_model(engine: Any, built_bytes: int | None = None) -> ModelMetadata:
    """Returns the model metadata of an existing engine; *built_bytes*: what its rank built whole."""
    is_half = bool(engine.bfloat16_enabled() or engine.fp16_enabled())
    return {
        **_model_of(engine.module, engine._config, int(engine.dp_world_size), is_half=is_half),
        **model_metadata.of_optimizer(engine.optimizer),
        "compute_dtype": _dtype_of(engine),
        **({} if built_bytes is None else {"built_bytes": built_bytes}),
        "accumulation": int(engine.gradient_accumulation_steps()),
        "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
    }


def _dtype_of(engine: Any) -> str:
    if engine.bfloat16_enabled():
        return "bfloat16"
    return "float16" if engine.fp16_enabled() else "float32"


def planned_model(model: Any, optimizer: Any, config: Any) -> ModelMetadata:
    """Returns the model metadata of an engine that is about to be built with *config*."""
    sections = (getattr(config, name, None) for name in ("float16_config", "bfloat16_config"))
    is_half = any(getattr(section, "enabled", False) for section in sections)
    metadata = _model_of(model, config, int(config.world_size), is_half=is_half)
    if optimizer is not None:
        return {**metadata, **model_metadata.of_optimizer(optimizer)}
    chosen = config.optimizer_params or {}
    momentum = float(chosen.get("momentum") or 0.0)
    return {**metadata, "optimizer": str(config.optimizer_name or ""), "momentum": momentum}


def _model_of(module: Any, config: Any, ranks: int, *, is_half: bool) -> ModelMetadata:
    """Returns the model metadata of an engine with *config*, except its optimizer's."""
    zero = config.zero_config
    return model_metadata.of_deepspeed(
        module,
        zero,
        ranks=ranks,
        is_half=is_half,
        optimizer_on=_place_name(_offload_device(zero.offload_optimizer)),
        params_on=_place_name(_offload_device(zero.offload_param)),
    )


def offload_of(*devices: str) -> Offload:
    """Returns the slowest of the *devices* where DeepSpeed keeps state: ``none``, ``cpu``, ``nvme``."""
    if "nvme" in devices:
        return Offload.NVME
    return Offload.HOST if "cpu" in devices else Offload.NONE


def _offload_device(offload: Any) -> str:
    """Returns ``none``, ``cpu`` or ``nvme``."""
    device = getattr(offload, "device", None)
    return str(getattr(device, "value", device) or NO_OFFLOAD)


def _place_name(device: str) -> str:
    """Returns the place in the words of :data:`zeromon.memory.spec.PLACES`."""
    return {"cpu": "host", "nvme": "nvme"}.get(device, "device")
