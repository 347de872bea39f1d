"""DeepSpeed: engines, their steps, the sub-modules and buckets that communicate, precision, offload.

All hooks are on classes, so that an engine built before the agent is watched like one built after.
DeepSpeed is never imported from here. Private names of it live here and in ``zero_roles``; each has
a canary test, and what a version lacks is reported as unknown.

Under ZeRO-3 a parameter must not be read through its module's attribute from within a hook (that
would gather it); everything here goes through ``named_parameters`` and the ``ds_*`` attributes.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from zeromon.events import Flag, Kind, Outcome, Path, UnitEvent, float_bits
from zeromon_agents import model_facts, zero_config, zero_roles
from zeromon_agents.census import Census, Provider, census_step
from zeromon_agents.guard import Guard
from zeromon_agents.imports import ImportWatch
from zeromon_agents.offload import Transfers
from zeromon_agents.patches import Patches
from zeromon_agents.pending import DeviceTimer
from zeromon_agents.recorder import OFF, ON, Recorder
from zeromon_agents.step import Steps, known_number

ENGINE = "deepspeed.runtime.engine"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
STAGE_3 = "deepspeed.runtime.zero.stage3"
GATHER = "_PartitionedParameterCoordinator__all_gather_params_"
REDUCE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"

_GROUPS = "deepspeed.utils.groups"
_GROUP_LABELS = {
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "zero_hpz",
    "_WORLD_GROUP": "zero",
    "_EXPERT_PARALLEL_GROUP": "expert_parallel",
    "_EXPERT_DATA_PARALLEL_GROUP": "expert_data_parallel",
    "_ALL_TO_ALL_GROUP": "all_to_all",
    "_TENSOR_MODEL_PARALLEL_GROUP": "tensor_parallel",
    "_MODEL_PARALLEL_GROUP": "model_parallel",
    "_DATA_PARALLEL_GROUP": "data_parallel",
}


class Engine:
    """What is known of one DeepSpeed engine, without keeping it alive."""

    def __init__(self, number: int, engine: Any, forget: Callable[[Any], None]) -> None:
        self.number = number
        self.ref = weakref.ref(engine, forget)
        self.stage = int(engine.zero_optimization_stage())
        zero = engine._config.zero_config
        self.optimizer_on = _device(zero.offload_optimizer)
        self.params_on = _device(zero.offload_param)
        self.plus_plus = bool(
            zero.zero_hpz_partition_size > 1
            or zero.zero_quantized_weights
            or zero.zero_quantized_gradients
        )
        self.bucket = 0
        """Buckets reduced since the forward began."""
        self.optimizer_id = id(engine.optimizer)
        self.modules: dict[int, int] = {}
        """id(sub-module) -> unit."""
        self.claims: Provider = functools.partial(_claims, self.ref)
        self.owners: dict[int, int] = {}
        """ds_id of a parameter -> unit of the sub-module that holds it."""

    @property
    def offloads(self) -> bool:
        """Whether the optimizer steps on the host."""
        return self.optimizer_on != "none"

    @property
    def strategy(self) -> str:
        """The value of the ``strategy`` label."""
        name = f"deepspeed-zero{self.stage}{'++' if self.plus_plus else ''}"
        places = {self.optimizer_on, self.params_on}
        return name + ("-nvme" if "nvme" in places else "-offload" if "cpu" in places else "")


class DeepSpeed:
    """The hooks on DeepSpeed's classes."""

    def __init__(
        self,
        recorder: Recorder,
        steps: Steps,
        device: DeviceTimer,
        patches: Patches,
        census: Census,
    ) -> None:
        self._recorder = recorder
        self._steps = steps
        self._device = device
        self._patches = patches
        self._census = census
        self.transfers = Transfers(recorder)
        self._engines: dict[int, Engine] = {}
        self._count = 0
        self._unseen: list[str] = []
        self._live: dict[int, int] = {}
        """ds_id -> bytes of the parameters that ZeRO-3 has gathered and not yet partitioned."""
        self._live_bytes = 0

    def watch(self, imports: ImportWatch) -> None:
        """Arms the hooks: on what is imported already, and on what will be."""
        for module, hook in (
            (ENGINE, self._watch_engine),
            (COORDINATOR, self._watch_coordinator),
            (STAGE_1_AND_2, self._watch_stage_1_and_2),
            (STAGE_3, self._watch_stage_3),
        ):
            imports.when_imported(module, self._recorder.guard.guarded(hook))

    # ---- installation -------------------------------------------------------------------------

    def _watch_engine(self, module: Any) -> None:
        engine = module.DeepSpeedEngine
        self._wrap(engine, "__init__", self._init_hook)
        self._wrap(engine, "forward", self._forward_hook)
        self._wrap(engine, "backward", self._backward_hook)
        self._wrap(engine, "_take_model_step", self._step_hook)
        self._wrap(engine, "allreduce_bucket", lambda f: self._bucket_hook(f, self._known))

    def _watch_coordinator(self, module: Any) -> None:
        coordinator = module.PartitionedParameterCoordinator
        self._available = module.ZeroParamStatus.AVAILABLE
        self._not_available = module.ZeroParamStatus.NOT_AVAILABLE
        self._wrap(coordinator, "fetch_sub_module", self._fetch_hook)
        self._wrap(coordinator, "release_sub_module", self._release_hook)
        self._wrap(coordinator, GATHER, self._gather_hook)

    def _watch_stage_1_and_2(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer
        reduce = "reduce_ipg_grads"
        self._wrap(optimizer, reduce, lambda f: self._bucket_hook(f, self._by_optimizer, filled))
        for name, read in (
            ("async_inplace_copy_grad_to_fp32_buffer_from_gpu", _gradient_offloaded),
            ("async_accumulate_grad_in_cpu_via_gpu", _gradient_accumulated),
        ):
            self._wrap(optimizer, name, functools.partial(self._transfer_hook, read))

    def _watch_stage_3(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer_Stage3
        self._wrap(
            optimizer, REDUCE_3, lambda f: self._bucket_hook(f, self._by_optimizer, _filled_3)
        )
        self._wrap(optimizer, "_post_step", self._persistent_hook)
        for name, read in (
            ("partition_grads", _gradients_partitioned),
            ("_reassign_or_swap_out_partitioned_parameters", _parameters_updated),
        ):
            self._wrap(optimizer, name, functools.partial(self._transfer_hook, read))

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Patches a method, or takes note that this version has no such one."""
        if name not in vars(owner):
            self._unseen.append(f"{owner.__name__}.{name}")
            return
        original = self._patches.original(owner, name)
        hook = functools.wraps(original)(make(original))
        self._patches.set(owner, name, hook)

    # ---- engines ------------------------------------------------------------------------------

    def saw_engine(self, engine: Any) -> None:
        """An engine that was found, not met at its forward."""
        self._known(engine)

    def _known(self, engine: Any) -> Engine:
        """The record of *engine*, made at first sight."""
        known = self._engines.get(id(engine))
        if known is None or known.ref() is not engine:
            known = self._learn(engine)
        return known

    def _learn(self, engine: Any) -> Engine:
        key = id(engine)
        self._count += 1
        known = Engine(self._count, engine, lambda _: self._forget(key))
        self._engines[key] = known
        prefix = "" if known.number == 1 else f"engine{known.number}:"
        for fqn, module in engine.module.named_modules():
            params = list(module.named_parameters(recurse=getattr(module, "_z3_leaf", False)))
            if not params or known.stage != 3:
                continue
            facts = {"params": len(params), "kind": "zero3", "engine": known.number}
            unit = self._recorder.unit_id(prefix + (fqn or "(root)"), facts)
            known.modules[id(module)] = unit
            for _, param in params:
                known.owners.setdefault(getattr(param, "ds_id", -1), unit)
        self._describe(engine, known)
        self._census.add(known.claims)
        return known

    def _describe(self, engine: Any, known: Engine) -> None:
        facts: dict[str, Any] = {"stage": known.stage, "strategy": known.strategy}
        try:
            facts["settings"] = zero_config.settings(engine)
        except Guard.CAUGHT as error:  # another version's configuration: shown as unknown
            self._recorder.guard.note(error, "settings")
        try:
            facts["model"] = {
                **_model_of(
                    engine.module,
                    engine._config,
                    int(engine.dp_world_size),
                    half=bool(engine.bfloat16_enabled() or engine.fp16_enabled()),
                ),
                **model_facts.of_optimizer(engine.optimizer),
                "accumulation": int(engine.gradient_accumulation_steps()),
                "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
            }
        except Guard.CAUGHT as error:  # likewise: no prediction then
            self._recorder.guard.note(error, "model facts")
        for part in ("offload_optimizer", "offload_param"):
            path = getattr(getattr(engine._config.zero_config, part), "nvme_path", None)
            if path is not None:
                facts["disk_path"] = os.path.abspath(path)
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        version = getattr(sys.modules.get("deepspeed"), "__version__", "")
        self._recorder.meta(
            strategy=known.strategy,
            optimizer=type(inner).__name__,
            deepspeed=version,
            unseen=self._unseen,
            **{f"engine{known.number}": facts},
        )

    def _forget(self, key: int) -> None:
        known = self._engines.pop(key, None)
        if known is not None:
            self._census.remove(known.claims)

    def _by_optimizer(self, optimizer: Any) -> Engine | None:
        for known in self._engines.values():
            if known.optimizer_id == id(optimizer):
                return known
        return None

    # ---- engine hooks -------------------------------------------------------------------------

    def _init_hook(self, original: Any) -> Any:
        """What it is going to keep is told before: making that may be the end of the process."""
        steps, foretell = self._steps, self._recorder.guard.guarded(self._foretell)

        def __init__(engine: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            steps.constructing += 1
            try:
                foretell(kwargs)
                original(engine, *args, **kwargs)
                foretell({})
            finally:
                steps.constructing -= 1

        return __init__

    def _foretell(self, arguments: dict[str, Any]) -> None:
        """The facts of an engine that is made with *arguments*; none without a configuration."""
        if self._recorder.mode == OFF:
            return
        config = arguments.get("config_class")
        facts = config and planned(arguments.get("model"), arguments.get("optimizer"), config)
        self._recorder.meta(planned=facts)

    def _forward_hook(self, original: Any) -> Any:
        recorder, steps = self._recorder, self._steps

        def forward(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or recorder.mode == OFF:
                return original(engine, *args, **kwargs)
            outer = recorder.engine
            try:
                known = self._known(engine)
                recorder.engine, known.bucket = known.number, 0
                self._device.mark_compute_stream()
                steps.forward_begins()
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "DeepSpeedEngine.forward")
            try:
                return original(engine, *args, **kwargs)
            finally:
                recorder.engine = outer
                try:
                    steps.forward_ends()
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "DeepSpeedEngine.forward")

        return forward

    def _backward_hook(self, original: Any) -> Any:
        """The engine's backward: autograd's, and the reduction of what is left in the buckets."""
        recorder, steps = self._recorder, self._steps

        def backward(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or recorder.mode == OFF:
                return original(engine, *args, **kwargs)
            outer, begun = recorder.engine, False
            try:
                recorder.engine = self._known(engine).number
                steps.backward_begins()
                begun = True
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "DeepSpeedEngine.backward")
            try:
                return original(engine, *args, **kwargs)
            finally:
                recorder.engine = outer
                try:
                    self._all_partitioned()
                    if begun:
                        steps.backward_ends()
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "DeepSpeedEngine.backward")

        return backward

    def _step_hook(self, original: Any) -> Any:
        recorder = self._recorder
        take_census = recorder.guard.guarded(self._census.take)  # must not cost the step

        def _take_model_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.mode == OFF:
                return original(engine, *args, **kwargs)
            outer, skipped = recorder.engine, 0
            try:
                known = self._known(engine)
                recorder.engine, skipped = known.number, engine.skipped_steps
                if recorder.mode == ON and census_step(recorder.step + 1, recorder.before):
                    take_census()
                self._steps.engine_step_begins(offloads=known.offloads)
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "_take_model_step")
            done = False
            try:
                result = original(engine, *args, **kwargs)
                done = True
                return result
            finally:
                try:
                    self._all_partitioned()
                    outcome = None
                    if done:
                        was_skipped = engine.skipped_steps > skipped
                        outcome = Outcome.SKIPPED if was_skipped else Outcome.APPLIED
                        self._note_precision(engine, recorder.engine)
                        if outcome is Outcome.APPLIED:
                            self._note_updated(engine)
                    taken = int(getattr(engine, "global_steps", 0))
                    self._steps.engine_step_ends(outcome, recorder.engine, taken)
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "_take_model_step")
                recorder.engine = outer

        return _take_model_step

    def _note_precision(self, engine: Any, number: int) -> None:
        optimizer = engine.optimizer
        scaler = getattr(optimizer, "loss_scaler", None)
        if scaler is None:
            scaler = getattr(optimizer, "loss_scale_config", None)
        scale, hysteresis = math.nan, -1
        if engine.fp16_enabled() and scaler is not None:
            scale = float(scaler.cur_scale)
            hysteresis = int(getattr(scaler, "cur_hysteresis", -1))
        norm = known_number(getattr(optimizer, "_global_grad_norm", None))
        # fmt: off
        self._recorder.write(time.monotonic_ns(), Kind.PRECISION, 0, 0, 0, number, 0,
                             float_bits(scale), hysteresis,
                             float_bits(0.0 if norm is None else norm), norm is not None)
        # fmt: on

    def _note_updated(self, engine: Any) -> None:
        """Stages 1 and 2: the updated shard of the parameters goes back to the device."""
        known = self._known(engine)
        if known.offloads and known.stage in (1, 2):
            buffers = getattr(
                engine.optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", None
            )
            self.transfers.add(Path.HOST_TO_DEVICE, sum(b.nbytes for b in buffers or ()))

    # ---- units: sub-modules and buckets -------------------------------------------------------

    def _unit_of(self, module: Any) -> tuple[int, int]:
        """(unit, engine) of a sub-module; (0, 0) for one without parameters."""
        key = id(module)
        for known in self._engines.values():
            unit = known.modules.get(key)
            if unit is not None:
                return unit, known.number
        return 0, 0

    _fetching: Any = None

    def _fetch_hook(self, original: Any) -> Any:
        recorder = self._recorder

        def fetch_sub_module(
            coordinator: Any, current_submodule: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if torch.compiler.is_compiling() or recorder.mode != ON:
                return original(coordinator, current_submodule, *args, **kwargs)
            outer = recorder.unit, recorder.engine, self._fetching
            try:
                self._fetching = current_submodule
                unit, engine = self._unit_of(current_submodule)
                if unit:
                    recorder.unit, recorder.engine = unit, engine
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "fetch_sub_module")
            try:
                return original(coordinator, current_submodule, *args, **kwargs)
            finally:
                recorder.unit, recorder.engine, self._fetching = outer

        return fetch_sub_module

    def _gather_hook(self, original: Any) -> Any:
        """The gather of some parameters: those of the sub-module at hand, or a prefetch."""
        recorder = self._recorder

        def gather(coordinator: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or recorder.mode != ON or self._fetching is None:
                return original(coordinator, params, *args, **kwargs)
            outer = recorder.unit
            try:
                self._note_gather(params)
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "all_gather_params")
            try:
                return original(coordinator, params, *args, **kwargs)
            finally:
                recorder.unit, recorder.ahead = outer, False

        return gather

    def _note_gather(self, params: Any) -> None:
        recorder = self._recorder
        wanted = [p for p in params if p.ds_status == self._not_available]
        if not wanted:
            return
        first = min(wanted, key=lambda p: p.ds_id)
        module = self._fetching
        needed = module.parameters(recurse=getattr(module, "_z3_leaf", False))
        ahead = all(first is not param for param in needed)
        engine = next((e for e in self._engines.values() if first.ds_id in e.owners), None)
        if ahead and engine is not None:
            recorder.unit = engine.owners[first.ds_id]
        recorder.ahead = ahead
        nbytes = 0
        for param in wanted:
            size = param.ds_numel * param.element_size()
            nbytes += size
            self._live_bytes += size - self._live.get(param.ds_id, 0)
            self._live[param.ds_id] = size
        # fmt: off
        recorder.write(time.monotonic_ns(), Kind.UNIT, UnitEvent.UNSHARD, recorder.phase,
                       Flag.AHEAD if ahead else 0, 0, recorder.unit, 0, -1, nbytes,
                       self._live_bytes)
        # fmt: on
        if engine is not None and engine.params_on != "none":
            moved = sum(p.ds_tensor.ds_numel * p.element_size() for p in wanted)
            self.transfers.add(Path.HOST_TO_DEVICE, moved)

    def _release_hook(self, original: Any) -> Any:
        recorder = self._recorder

        def release_sub_module(coordinator: Any, submodule: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(coordinator, submodule, *args, **kwargs)
            if not torch.compiler.is_compiling() and recorder.mode == ON:
                try:
                    unit, _ = self._unit_of(submodule)
                    if unit and self._note_partitioned(submodule):
                        # fmt: off
                        recorder.write(time.monotonic_ns(), Kind.UNIT, UnitEvent.RESHARD,
                                       recorder.phase, 0, 0, unit, 0, -1, 0, self._live_bytes)
                        # fmt: on
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "release_sub_module")
            return result

        return release_sub_module

    def _note_partitioned(self, submodule: Any) -> bool:
        """Takes away what *submodule* has partitioned; whether that was anything."""
        freed = 0
        for param in submodule.parameters(recurse=getattr(submodule, "_z3_leaf", False)):
            if param.ds_status == self._not_available:
                freed += self._live.pop(param.ds_id, 0)
        self._live_bytes -= freed
        return freed > 0

    def _all_partitioned(self) -> None:
        """At the end of backward ZeRO-3 partitions all that is left, without releasing each."""
        self._live.clear()
        self._live_bytes = 0

    def _bucket_hook(
        self,
        original: Any,
        engine_of: Callable[[Any], Engine | None],
        is_filled: Callable[..., bool] = lambda *_: True,
    ) -> Any:
        """The reduction of one bucket: its collectives are the bucket's."""
        recorder = self._recorder

        def reduce(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or recorder.mode != ON:
                return original(owner, *args, **kwargs)
            outer = recorder.unit, recorder.engine
            try:
                known = engine_of(owner)
                if known is not None and is_filled(owner, *args):
                    prefix = "" if known.number == 1 else f"engine{known.number}:"
                    facts = {"kind": "bucket", "engine": known.number}
                    recorder.unit = recorder.unit_id(f"{prefix}bucket {known.bucket}", facts)
                    recorder.engine = known.number
                    known.bucket += 1
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "reduce bucket")
            try:
                return original(owner, *args, **kwargs)
            finally:
                recorder.unit, recorder.engine = outer

        return reduce

    def _persistent_hook(self, original: Any) -> Any:
        """After the step ZeRO-3 gathers the parameters that it never partitions."""
        recorder = self._recorder

        def _post_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            outer = recorder.unit
            try:
                if recorder.mode == ON:
                    recorder.unit = recorder.unit_id("(persistent parameters)", {"kind": "zero3"})
            except Guard.CAUGHT as error:
                recorder.guard.note(error, "_post_step")
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                recorder.unit = outer

        return _post_step

    # ---- offload ------------------------------------------------------------------------------

    def _transfer_hook(self, read: Callable[..., list[tuple[Path, int]]], original: Any) -> Any:
        """A method that copies: *read* tells what, from its arguments.

        On a device the copies are asynchronous, so only their bytes are known.
        """
        recorder = self._recorder

        def copy(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            known = self._by_optimizer(optimizer) if recorder.mode != OFF else None
            moved: list[tuple[Path, int]] = []
            if known is not None and (known.offloads or known.params_on != "none"):
                try:
                    moved = read(optimizer, known, *args, **kwargs)
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, original.__name__)
            started = time.monotonic_ns()
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                spent = 0 if torch.cuda.is_initialized() else time.monotonic_ns() - started
                for path, nbytes in moved:
                    self.transfers.add(path, nbytes, spent, spent)

        return copy


def _model_of(module: Any, config: Any, ranks: int, *, half: bool) -> dict[str, Any]:
    """The facts of the model of an engine with *config*, but for its optimizer."""
    zero = config.zero_config
    return model_facts.of_deepspeed(
        module,
        zero,
        ranks=ranks,
        half=half,
        optimizer_on=_place(_device(zero.offload_optimizer)),
        params_on=_place(_device(zero.offload_param)),
    )


def planned(model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    """The facts of the model of an engine that is to be made with *config*."""
    parts = (getattr(config, name, None) for name in ("float16_config", "bfloat16_config"))
    half = any(getattr(part, "enabled", False) for part in parts)
    facts = _model_of(model, config, int(config.world_size), half=half)
    if optimizer is not None:
        return facts | model_facts.of_optimizer(optimizer)
    chosen = config.optimizer_params or {}
    momentum = float(chosen.get("momentum") or 0.0)
    return {**facts, "optimizer": str(config.optimizer_name or ""), "momentum": momentum}


def _device(offload: Any) -> str:
    """``none``, ``cpu`` or ``nvme``."""
    device = getattr(offload, "device", None)
    return str(getattr(device, "value", device) or "none")


def _place(device: str) -> str:
    """Where that is, in the words of :data:`zeromon.model.PLACES`."""
    return {"cpu": "host", "nvme": "nvme"}.get(device, "device")


def _claims(ref: weakref.ref[Any]) -> Any:
    engine = ref()
    return () if engine is None else zero_roles.claims(engine)


def filled(optimizer: Any, comm_dtype: Any = None, *_: Any) -> bool:
    """Stages 1 and 2: whether there is something to reduce."""
    buckets = optimizer.ipg_buckets
    chosen = buckets.values() if comm_dtype is None else (buckets[comm_dtype],)
    return any(bucket.params for bucket in chosen)


def _filled_3(optimizer: Any, communication_data_type: Any, *_: Any) -> bool:
    return bool(optimizer.ipg_buckets[communication_data_type].params)


def _gradient_offloaded(optimizer: Any, _: Engine, param: Any) -> list[tuple[Path, int]]:
    """Stages 1 and 2: this rank's part of one gradient, in the master's precision."""
    numel = optimizer.grad_position[optimizer.get_param_id(param)][3]
    return [(Path.DEVICE_TO_HOST, numel * optimizer.master_weights_and_grads_dtype.itemsize)]


def _gradient_accumulated(optimizer: Any, _: Engine, param: Any) -> list[tuple[Path, int]]:
    """Stages 1 and 2 while gradients accumulate: the whole gradient out, and before that back in."""
    moved = [(Path.DEVICE_TO_HOST, param.numel() * param.element_size())]
    if optimizer.micro_step_id > 0:
        moved.append((Path.HOST_TO_DEVICE, moved[0][1]))
    return moved


def _gradients_partitioned(
    optimizer: Any, known: Engine, _: Any, grad_partitions: Any
) -> list[tuple[Path, int]]:
    """Stage 3: the shards of a bucket's gradients, to the host at the accumulation boundary.

    Where the gradients' own buffer is on the host, they are staged there first and come back.
    """
    if not known.offloads:
        return []
    numel = sum(partition.numel() for partition in grad_partitions)
    moved = []
    buffer = optimizer.grad_partitions_flat_buffer
    if any(partition.device != buffer.device for partition in grad_partitions[:1]):
        staged = numel * buffer.element_size()
        moved += [(Path.DEVICE_TO_HOST, staged), (Path.HOST_TO_DEVICE, staged)]
    if optimizer.is_gradient_accumulation_boundary():
        size = optimizer.master_weights_and_grads_dtype.itemsize
        moved.append((Path.DEVICE_TO_HOST, numel * size))
    return moved


def _parameters_updated(optimizer: Any, known: Engine, sub_group_id: int) -> list[tuple[Path, int]]:
    """Stage 3: the updated shard of one sub-group goes back to the device."""
    flat = optimizer.fp16_partitioned_groups_flat[sub_group_id]
    if flat is None or not known.offloads or known.params_on != "none":
        return []
    return [(Path.HOST_TO_DEVICE, flat.nbytes)]


def group_label(pg: Any) -> str:
    """The name of one of DeepSpeed's process groups, "" for others."""
    module = sys.modules.get(_GROUPS)
    if module is None:
        return ""
    for name, label in _GROUP_LABELS.items():
        held = getattr(module, name, None)
        if held is pg:
            return label
        if isinstance(held, dict):
            for key, group in held.items():
                if group is pg:
                    return f"{label}:{key}"
    return ""
