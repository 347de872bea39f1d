"""The engine's own hooks: construction, forward, backward, optimizer step, precision."""

import math
import os
import sys
import time
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from zeromon.ring.codes import Flag, Kind, Outcome, Path, UnitEvent
from zeromon.ring.events import float_bits
from zeromon.ring.model_metadata import PERSISTENT, ModelMetadata
from zeromon.ring.strategy import Offload, Strategy, deepspeed_strategy
from zeromon_agents.hooks.backend import Services
from zeromon_agents.observe import model_metadata, zero_roles
from zeromon_agents.observe.accelerator import current_accelerator
from zeromon_agents.observe.census import Claims, Provider, census_step
from zeromon_agents.observe.offload import Transfers
from zeromon_agents.observe.step import known_number
from zeromon_agents.runtime.around import RAISED, SKIP
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import OFF, ON, HookContext

NO_OFFLOAD = "none"


class SubModule(NamedTuple):
    """A module that holds parameters of an engine of stage 3."""

    unit: int
    engine: int


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
        self.modules: dict[int, SubModule] = {}
        """id(sub-module) -> what the hooks know of it; looked up more than a hundred times a step."""
        self.parameters: dict[int, tuple[int, ...]] = {}
        """Unit of a sub-module -> the ds_id of each parameter that is gathered with it."""
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
        # Another engine may have the address of a deleted one
        if record is None or record.ref() is not engine:
            key = id(engine)
            # Else modules of a deleted engine at this address would pass for those of this one
            self._forget_engine(key)
            self._count += 1
            record = Engine(self._count, engine, lambda _: self._forget_engine(key))
            self._engines[key] = record
            if record.stage == 3:
                self._name_units(engine, record)
            self._write_metadata(engine, record)
        return record

    def by_optimizer(self, optimizer: Any) -> Engine | None:
        """Returns the engine that *optimizer* belongs to."""
        owners = (e for e in self._engines.values() if e.optimizer_id == id(optimizer))
        return next(owners, None)

    def by_parameter(self, ds_id: int) -> Engine | None:
        """Returns the engine whose parameter has the number *ds_id*."""
        for engine in self._engines.values():  # without a generator: this runs at each gather
            if ds_id in engine.owners:
                return engine
        return None

    def providers(self) -> list[Provider]:
        """Returns what gives the memory census each engine's tensors."""
        return [record.claims for record in self._engines.values()]

    def _forget_engine(self, key: int) -> None:
        dropped = self._engines.pop(key, None)
        if dropped is not None:
            self._dropped.append(dropped)
            for module in dropped.modules:
                sub_module = self.modules.pop(module, None)
                if sub_module is not None:
                    self.parameters.pop(sub_module.unit, None)

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
            params = dict.fromkeys(own_parameters(module))  # a module may have one under two names
            if not params:
                continue
            described = {"params": len(params), "kind": "zero3", "engine": record.number}
            unit = self._context.unit_id(record.prefix + (fqn or "(root)"), described)
            ds_ids = tuple(getattr(param, "ds_id", -1) for param in params)
            # Engines may share modules: the end of the second must not take away those of the first
            if id(module) not in self.modules:
                record.modules.append(id(module))
                self.modules[id(module)] = SubModule(unit, record.number)
                self.parameters[unit] = ds_ids
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
        rank_facts: dict[str, Any] = {}
        # A frozen teacher beside what is trained does not say how the rank trains
        if record.number == 1 or hasattr(inner, "param_groups"):
            rank_facts = {**record.strategy.metadata(), "optimizer": type(inner).__name__}
        self._context.add_metadata(
            **rank_facts,
            deepspeed=getattr(sys.modules.get("deepspeed"), "__version__", ""),
            unseen=self.missing,
            **{f"engine{record.number}": metadata},
        )


def own_parameters(module: Any) -> list[Any]:
    """Returns the parameters that ZeRO-3 gathers with *module*: its own; of a leaf module, all."""
    if getattr(module, "_z3_leaf", False):
        return list(module.parameters())
    # Not by name: the ZeROOrderedDict of stage 3 gathers what is looked up
    return [param for param in module._parameters.values() if param is not None]


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
    # On a device DeepSpeed makes its own fused Adam, unless torch_adam says otherwise
    step = "foreach" if chosen.get("torch_adam") else "fused"
    if current_accelerator() is None:
        step = "for-loop"
    name = str(config.optimizer_name or "")
    return {**metadata, "optimizer": name, "momentum": momentum, "optimizer_step": step}


def _model_of(module: Any, config: Any, ranks: int, *, is_half: bool) -> ModelMetadata:
    """Returns the model metadata of an engine with *config*, except its optimizer's."""
    zero = config.zero_config
    accumulates = getattr(config, "grad_accum_dtype", None)
    if isinstance(accumulates, str):  # the table of its names
        accumulates = sys.modules["deepspeed.runtime.config"].DtypeEnum(accumulates).value
    return model_metadata.of_deepspeed(
        module,
        zero,
        ranks=ranks,
        is_half=is_half,
        grad_bytes=getattr(accumulates, "itemsize", 0),
        reduce_bytes=getattr(getattr(config, "communication_data_type", None), "itemsize", 0),
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


# ---- hooks of the engine -------------------------------------------------------------------------


_number_of: Callable[[Any], int] = attrgetter("ds_id")
_AVAILABLE = "_PartitionedParameterCoordinator__n_available_params"
"""The attribute in which a coordinator counts the elements of gathered parameters."""


class Gathers:
    """Runs before and after the methods of PartitionedParameterCoordinator."""

    def __init__(self, context: HookContext, engines: Engines, transfers: Transfers) -> None:
        self._context = context
        self._engines = engines
        self._transfers = transfers
        self.not_available: Any = None
        """``ZeroParamStatus.NOT_AVAILABLE`` of this DeepSpeed."""

    def fetch_begins(self, _: Any, module: Any, *__: Any, **___: Any) -> None:
        """Gives the unit of *module* to the gathers that follow."""
        registered = self._engines.modules.get(id(module))
        if registered is not None:
            self._context.unit, self._context.engine = registered

    def gather_begins(self, coordinator: Any, params: Any, *_: Any, **__: Any) -> None:
        """Writes the gather of the *params* that are not available: needed now, or a prefetch."""
        missing = [param for param in params if param.ds_status == self.not_available]
        if not missing:
            return
        context, first_number = self._context, min(map(_number_of, missing))
        ahead = first_number not in self._engines.parameters.get(context.unit, ())
        engine = self._engines.by_parameter(first_number)
        if ahead and engine is not None:
            context.unit = engine.owners[first_number]
        context.prefetch(ahead=ahead)
        itemsize, numel = missing[0].element_size(), sum([param.ds_numel for param in missing])
        gathered = getattr(coordinator, _AVAILABLE, None)
        # fmt: off
        context.write(time.monotonic_ns(), Kind.UNIT, UnitEvent.UNSHARD, context.phase,
                      Flag.AHEAD if ahead else 0, 0, context.unit, 0, -1, numel * itemsize,
                      0 if gathered is None else (gathered + numel) * itemsize)
        # fmt: on
        if engine is not None and engine.offloads_params:
            moved = sum(p.ds_tensor.ds_numel * p.element_size() for p in missing)
            self._transfers.add(Path.HOST_TO_DEVICE, moved)

    def gather_ends(self, *_: Any) -> None:
        """Ends the gather; a collective issued after it is no prefetch."""
        if self._context.ahead:
            self._context.prefetch(ahead=False)

    def persistent_begins(self, *_: Any, **__: Any) -> None:
        """Gives a unit to the gather, after a step, of parameters that ZeRO-3 never partitions."""
        self._context.unit = self._context.unit_id(PERSISTENT, {"kind": "zero3"})


_NEW = (1, 2)
"""Steps of an engine after which its optimizer's state is there: what a rank holds has changed."""


class EngineSteps:
    """Runs before and after the methods of DeepSpeedEngine."""

    def __init__(self, services: Services, engines: Engines) -> None:
        self._context = services.context
        self._steps = services.steps
        self._device = services.device
        self._transfers = services.transfers
        self._engines = engines
        guarded = services.context.guard.guarded
        self._take_census = guarded(services.census.take)  # its failure must not lose the step
        self._write_planned = guarded(self._write_planned_model)
        self._scalars = services.scalars

    def init_begins(self, _: Any, *__: Any, **arguments: Any) -> int:
        """Writes the model that is going to be built: building it may end the process.

        Returns the bytes of it that this rank has built whole.
        """
        self._steps.initializing += 1
        self._write_planned(arguments)
        model = arguments.get("model")
        params = model.parameters() if model is not None else ()
        return sum(p.nbytes for p in params if not hasattr(p, "ds_id"))

    def init_ends(self, built_bytes: int | None, result: Any, engine: Any, *__: Any) -> None:
        """Registers the engine, whose own metadata replace the planned model."""
        # Before the test: a constructor that raised would else hide every optimizer step of the script
        self._steps.initializing -= 1
        if result is not RAISED:
            self._write_planned({})
            stage_3 = engine.zero_optimization_stage() == 3
            self._engines.built_bytes[id(engine)] = built_bytes if stage_3 else None
            if self._context.mode != OFF:
                self._engines.of(engine)  # one that runs by its module alone has no forward of its own

    def _write_planned_model(self, arguments: dict[str, Any]) -> None:
        if self._context.mode == OFF:
            return
        config = arguments.get("config_class")
        planned = config and planned_model(arguments.get("model"), arguments.get("optimizer"), config)
        self._context.add_metadata(planned=planned)

    def forward_begins(self, engine: Any, *args: Any, **kwargs: Any) -> None:
        """Starts the forward phase; registers an engine that is older than the agent."""
        record = self._engines.of(engine)
        self._context.engine, record.bucket = record.number, 0
        self._steps.forward_begins(engine, args, kwargs)
        self._device.mark_compute_stream()

    def forward_ends(self, *_: Any) -> None:
        """Ends the forward phase."""
        self._steps.forward_ends()

    def backward_begins(self, engine: Any, loss: Any = (), *_: Any, **__: Any) -> bool:
        """Starts the backward phase from *loss*: autograd's, and the reduction of the last buckets."""
        self._context.engine = self._engines.of(engine).number
        self._steps.backward_begins(loss)
        return True

    def backward_ends(self, has_begun: bool | None, *_: Any) -> None:
        """Ends the backward phase, where it has begun."""
        if has_begun:
            self._steps.backward_ends()

    def step_begins(self, engine: Any, *_: Any, **__: Any) -> Any:
        """Starts the optimizer phase; returns how many steps the engine has skipped."""
        # `step` calls `_take_model_step`, which has the same hook: the outer call alone is a step
        if self._steps.in_engine or not engine.is_gradient_accumulation_boundary():
            return SKIP
        context = self._context
        record = self._engines.of(engine)
        context.engine, skipped = record.number, int(engine.skipped_steps)
        self._steps.engine_step_begins(offloads=record.offloads_optimizer)
        is_new = int(getattr(engine, "global_steps", 0)) in _NEW
        if context.mode == ON and (is_new or census_step(context.step + 1, context.steps_before)):
            self._take_census()
        self._scalars.optimizer_steps(engine.optimizer)
        return skipped

    def step_ends(self, skipped: int | None, result: Any, engine: Any, *_: Any) -> None:
        """Ends the step: applied, skipped for an overflow, or raised."""
        number, outcome = self._context.engine, None
        if result is not RAISED:
            was_skipped = engine.skipped_steps > (skipped or 0)
            outcome = Outcome.SKIPPED if was_skipped else Outcome.APPLIED
            self._write_precision(engine, number)
            if outcome is Outcome.APPLIED:
                # Adds the copy of stages 1 and 2 that brings the updated shard back to the device
                record = self._engines.of(engine)
                if record.offloads_optimizer and record.stage in (1, 2):
                    name = "param_buffer_of_bit16_for_cpu_offload_groups"
                    buffers = getattr(engine.optimizer, name, None) or ()
                    self._transfers.add(Path.HOST_TO_DEVICE, sum(buffer.nbytes for buffer in buffers))
        self._steps.engine_step_ends(outcome, number, int(getattr(engine, "global_steps", 0)))

    def _write_precision(self, engine: Any, number: int) -> None:
        optimizer = engine.optimizer
        scaler = getattr(optimizer, "loss_scaler", None)
        if scaler is None:
            scaler = getattr(optimizer, "loss_scale_config", None)
        scale, hysteresis = math.nan, -1
        if engine.fp16_enabled() and scaler is not None:
            scale = float(scaler.cur_scale)
            hysteresis = int(getattr(scaler, "cur_hysteresis", -1))
        norm = known_number(getattr(optimizer, "_global_grad_norm", None))
        bits = float_bits(0.0 if norm is None else norm)
        self._context.emit(
            Kind.PRECISION, float_bits(scale), hysteresis, bits, norm is not None, group=number
        )
