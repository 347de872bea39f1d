"""The engine's own hooks: construction, forward, backward, optimizer step, precision."""

import math
import time
from typing import Any

from zeromon.ring.events import Flag, Kind, Outcome, Path, UnitEvent, float_bits
from zeromon.ring.model_metadata import PERSISTENT
from zeromon_agents.hooks.backend import Services
from zeromon_agents.hooks.deepspeed.engines import Engines, own_parameters, planned_model
from zeromon_agents.observe.census import census_step
from zeromon_agents.observe.offload import Transfers
from zeromon_agents.observe.step import known_number
from zeromon_agents.runtime.around import RAISED, SKIP
from zeromon_agents.runtime.hook_context import OFF, ON, HookContext


class Gathers:
    """Runs before and after the methods of PartitionedParameterCoordinator."""

    def __init__(self, context: HookContext, engines: Engines, transfers: Transfers) -> None:
        self._context = context
        self._engines = engines
        self._transfers = transfers
        self._fetching: Any = None
        """The sub-module that is being fetched."""
        self._gathered: dict[int, int] = {}
        """ds_id -> bytes of the parameters that are gathered and not yet partitioned."""
        self._gathered_bytes = 0
        self.not_available: Any = None
        """``ZeroParamStatus.NOT_AVAILABLE`` of this DeepSpeed."""

    def fetch_begins(self, _: Any, module: Any, *__: Any, **___: Any) -> Any:
        """Gives the unit of *module* to the gathers that follow; returns the module fetched around."""
        outer, self._fetching = self._fetching, module
        unit, engine, _ = self._engines.sub_module(module)
        if unit:
            self._context.unit, self._context.engine = unit, engine
        return outer

    def fetch_ends(self, outer: Any, *_: Any) -> None:
        """Ends the fetch."""
        self._fetching = outer

    def gather_begins(self, _: Any, params: Any, *__: Any, **___: Any) -> None:
        """Writes the gather of the *params* that are not available: needed now, or a prefetch."""
        if self._fetching is None:
            return
        missing = [param for param in params if param.ds_status == self.not_available]
        if not missing:
            return
        context = self._context
        first_param = min(missing, key=lambda param: param.ds_id)
        ahead = all(first_param is not param for param in own_parameters(self._fetching))
        engine = self._engines.by_parameter(first_param.ds_id)
        if ahead and engine is not None:
            context.unit = engine.owners[first_param.ds_id]
        context.prefetch(ahead=ahead)
        nbytes = self._add_gathered(missing)
        # fmt: off
        context.write(time.monotonic_ns(), Kind.UNIT, UnitEvent.UNSHARD, context.phase,
                      Flag.AHEAD if ahead else 0, 0, context.unit, 0, -1, nbytes,
                      self._gathered_bytes)
        # fmt: on
        if engine is not None and engine.offloads_params:
            moved = sum(p.ds_tensor.ds_numel * p.element_size() for p in missing)
            self._transfers.add(Path.HOST_TO_DEVICE, moved)

    def gather_ends(self, *_: Any) -> None:
        """Ends the gather; a collective issued after it is no prefetch."""
        if self._context.ahead:
            self._context.prefetch(ahead=False)

    def release_ends(self, _: None, result: Any, __: Any, module: Any, *___: Any) -> None:
        """Writes that *module* was partitioned, where it freed anything."""
        if result is RAISED or not self._gathered:
            return
        unit, _engine, ds_ids = self._engines.sub_module(module)
        if not unit or self._gathered.keys().isdisjoint(ds_ids):
            return
        if self._subtract_partitioned(module):
            # fmt: off
            self._context.write(time.monotonic_ns(), Kind.UNIT, UnitEvent.RESHARD,
                                self._context.phase, 0, 0, unit, 0, -1, 0, self._gathered_bytes)
            # fmt: on

    def persistent_begins(self, *_: Any, **__: Any) -> None:
        """Gives a unit to the gather, after a step, of parameters that ZeRO-3 never partitions."""
        self._context.unit = self._context.unit_id(PERSISTENT, {"kind": "zero3"})

    def all_partitioned(self) -> None:
        """Resets the gathered bytes: the end of backward partitions what no release has freed."""
        self._gathered.clear()
        self._gathered_bytes = 0

    def _add_gathered(self, params: list[Any]) -> int:
        """Adds *params* to what is gathered; returns their bytes."""
        total = 0
        for param in params:
            nbytes = param.ds_numel * param.element_size()
            total += nbytes
            self._gathered_bytes += nbytes - self._gathered.get(param.ds_id, 0)
            self._gathered[param.ds_id] = nbytes
        return total

    def _subtract_partitioned(self, module: Any) -> bool:
        """Subtracts what *module* has partitioned; returns whether that was anything."""
        freed = 0
        for param in own_parameters(module):
            if param.ds_status == self.not_available:
                freed += self._gathered.pop(param.ds_id, 0)
        self._gathered_bytes -= freed
        return freed > 0


_NEW = (1, 2)
"""Steps of an engine after which its optimizer's state is there: what a rank holds has changed."""


class EngineSteps:
    """Runs before and after the methods of DeepSpeedEngine."""

    def __init__(self, services: Services, engines: Engines, gathers: Gathers) -> None:
        self._context = services.context
        self._steps = services.steps
        self._device = services.device
        self._transfers = services.transfers
        self._engines = engines
        self._gathers = gathers
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
        """Removes the planned model, which the engine's own metadata replaces."""
        self._steps.initializing -= 1
        if result is not RAISED:
            self._write_planned({})
            stage_3 = engine.zero_optimization_stage() == 3
            self._engines.built_bytes[id(engine)] = built_bytes if stage_3 else None

    def _write_planned_model(self, arguments: dict[str, Any]) -> None:
        if self._context.mode == OFF:
            return
        config = arguments.get("config_class")
        planned = config and planned_model(arguments.get("model"), arguments.get("optimizer"), config)
        self._context.add_metadata(planned=planned)

    def forward_begins(self, engine: Any, *args: Any, **kwargs: Any) -> None:
        """Starts the forward phase; registers the engine at its first forward."""
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
        self._gathers.all_partitioned()
        if has_begun:
            self._steps.backward_ends()

    def step_begins(self, engine: Any, *_: Any, **__: Any) -> Any:
        """Starts the optimizer phase; returns how many steps the engine has skipped."""
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
        self._gathers.all_partitioned()
        number, outcome = self._context.engine, None
        if result is not RAISED:
            was_skipped = engine.skipped_steps > (skipped or 0)
            outcome = Outcome.SKIPPED if was_skipped else Outcome.APPLIED
            self._write_precision(engine, number)
            if outcome is Outcome.APPLIED:
                self._add_updated(engine)
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

    def _add_updated(self, engine: Any) -> None:
        """Adds the copy of stages 1 and 2 that brings the updated shard back to the device."""
        record = self._engines.of(engine)
        if record.offloads_optimizer and record.stage in (1, 2):
            name = "param_buffer_of_bit16_for_cpu_offload_groups"
            buffers = getattr(engine.optimizer, name, None) or ()
            self._transfers.add(Path.HOST_TO_DEVICE, sum(buffer.nbytes for buffer in buffers))
