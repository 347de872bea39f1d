"""Installs the hooks on DeepSpeed's classes."""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from zeromon.ring.codes import Path
from zeromon_agents.hooks.backend import Backend, ImportHook, Services
from zeromon_agents.hooks.deepspeed.steps import Engine, Engines, EngineSteps, Gathers
from zeromon_agents.observe import accelerator
from zeromon_agents.observe.census import Provider
from zeromon_agents.observe.offload import BUILDERS, Disk
from zeromon_agents.runtime.around import SKIP, UnitEntry
from zeromon_agents.runtime.hook_context import OFF, ON

Copied = list[tuple[Path, int]]
"""Direction and bytes of each copy."""


def gradient_offloaded(optimizer: Any, _: Engine, param: Any) -> Copied:
    """Stages 1 and 2: this rank's part of one gradient, in the precision of the master weights."""
    numel = optimizer.grad_position[optimizer.get_param_id(param)][3]
    return [(Path.DEVICE_TO_HOST, numel * optimizer.master_weights_and_grads_dtype.itemsize)]


def gradient_accumulated(optimizer: Any, _: Engine, param: Any) -> Copied:
    """Stages 1 and 2 during accumulation: the whole gradient in from the host, and out again."""
    copied = [(Path.DEVICE_TO_HOST, param.numel() * param.element_size())]
    if optimizer.micro_step_id > 0:
        copied.append((Path.HOST_TO_DEVICE, copied[0][1]))
    return copied


def gradients_partitioned(optimizer: Any, record: Engine, _: Any, grad_partitions: Any) -> Copied:
    """Stage 3: the shards of a bucket's gradients, to the host at the accumulation boundary.

    Where the gradients' own buffer is on the host, they are staged there first and come back.
    """
    if not record.offloads_optimizer:
        return []
    numel = sum(partition.numel() for partition in grad_partitions)
    copied = []
    buffer = optimizer.grad_partitions_flat_buffer
    if any(partition.device != buffer.device for partition in grad_partitions[:1]):
        staged = numel * buffer.element_size()
        copied += [(Path.DEVICE_TO_HOST, staged), (Path.HOST_TO_DEVICE, staged)]
    if optimizer.is_gradient_accumulation_boundary():
        size = optimizer.master_weights_and_grads_dtype.itemsize
        copied.append((Path.DEVICE_TO_HOST, numel * size))
    return copied


def parameters_updated(optimizer: Any, record: Engine, sub_group_id: int) -> Copied:
    """Stage 3: the updated shard of one sub-group returns to the device."""
    flat = optimizer.fp16_partitioned_groups_flat[sub_group_id]
    # Parameters on NVMe have no flat group here, and those that are offloaded stay on the host
    if flat is None or not record.offloads_optimizer or record.offloads_params:
        return []
    return [(Path.HOST_TO_DEVICE, flat.nbytes)]


ENGINE = "deepspeed.runtime.engine"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
STAGE_3 = "deepspeed.runtime.zero.stage3"
GATHER = "_PartitionedParameterCoordinator__all_gather_params_"
REDUCE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"

_GROUPS = "deepspeed.utils.groups"
GROUP_LABELS = {
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "zero_hpz",
    "_WORLD_GROUP": "zero",
    "_EXPERT_PARALLEL_GROUP": "expert_parallel",
    "_EXPERT_DATA_PARALLEL_GROUP": "expert_data_parallel",
    "_ALL_TO_ALL_GROUP": "all_to_all",
    "_TENSOR_MODEL_PARALLEL_GROUP": "tensor_parallel",
    "_MODEL_PARALLEL_GROUP": "model_parallel",
    "_DATA_PARALLEL_GROUP": "data_parallel",
}
"""Variables of ``deepspeed.utils.groups``, and the labels of the groups that they hold."""


class DeepSpeed(Backend):
    """The hooks on DeepSpeed's classes."""

    classes = ((ENGINE, "DeepSpeedEngine"),)

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._engines = Engines(services.context)
        self._gathers = Gathers(services.context, self._engines, services.transfers)
        self._engine_steps = EngineSteps(services, self._engines)

    def hooks(self) -> Iterable[ImportHook]:
        """Patches the engine, the ZeRO optimizers, the coordinator and the disk operators."""
        return (
            (ENGINE, self._watch_engine),
            (COORDINATOR, self._watch_coordinator),
            (STAGE_1_AND_2, self._watch_stage_1_and_2),
            (STAGE_3, self._watch_stage_3),
            (BUILDERS, Disk(self.context, self.transfers, self.patches).watch),
        )

    def adopt(self, instance: Any) -> None:
        """Registers an engine."""
        self._engines.of(instance)

    def look(self) -> None:
        """Writes which engines the script has let go of."""
        self._engines.write_dropped()

    def roles(self) -> Iterable[Provider]:
        """Returns one provider for each engine."""
        return self._engines.providers()

    def group_label(self, pg: Any) -> str:
        """Returns the label of a group in ``deepspeed.utils.groups``; "" for any other group."""
        module = sys.modules.get(_GROUPS)
        for name, label in GROUP_LABELS.items():
            variable = getattr(module, name, None)
            if variable is pg:
                return label
            # DeepSpeed keeps a dictionary of expert groups, by the size of the expert parallelism
            if isinstance(variable, dict):
                for key, group in variable.items():
                    if group is pg:
                        return f"{label}:{key}"
        return ""

    # ---- installation -------------------------------------------------------------------------

    def _watch_engine(self, module: Any) -> None:
        engine, steps = module.DeepSpeedEngine, self._engine_steps
        patch = partial(self._patch_method, engine)
        # From OFF on: the number of engines under construction must be right when the mode changes
        patch("__init__", steps.init_begins, steps.init_ends, active_from=OFF)
        patch("forward", steps.forward_begins, steps.forward_ends, scoped=True, traced=True)
        patch("backward", steps.backward_begins, steps.backward_ends, scoped=True, traced=True)
        for name in ("step", "_take_model_step"):  # a pipeline calls the second alone
            patch(name, steps.step_begins, steps.step_ends, scoped=True)
        self._patch_bucket(engine, "allreduce_bucket", self._engines.of)

    def _watch_coordinator(self, module: Any) -> None:
        gathers = self._gathers
        gathers.not_available = module.ZeroParamStatus.NOT_AVAILABLE
        # DeepSpeed keeps its own fetches out of compiled graphs
        patch = partial(self._patch_method, module.PartitionedParameterCoordinator, active_from=ON)
        entry = UnitEntry(1, units=self._engines.modules)
        patch("fetch_sub_module", gathers.fetch_begins, scoped=True, unit_entry=entry)
        patch(GATHER, gathers.gather_begins, gathers.gather_ends, scoped=True)

    def _watch_stage_1_and_2(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer
        self._patch_bucket(optimizer, "reduce_ipg_grads", self._engines.by_optimizer, has_gradient)
        self._patch_copy(
            optimizer, "async_inplace_copy_grad_to_fp32_buffer_from_gpu", gradient_offloaded
        )
        self._patch_copy(optimizer, "async_accumulate_grad_in_cpu_via_gpu", gradient_accumulated)

    def _watch_stage_3(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer_Stage3
        self._patch_bucket(optimizer, REDUCE_3, self._engines.by_optimizer, has_gradient)
        self._patch_method(
            optimizer, "_post_step", self._gathers.persistent_begins, scoped=True, active_from=ON
        )
        self._patch_copy(optimizer, "partition_grads", gradients_partitioned)
        self._patch_copy(optimizer, "_reassign_or_swap_out_partitioned_parameters", parameters_updated)

    def _patch_method(self, owner: Any, name: str, *hooks: Any, **options: Any) -> None:
        """Patches a method, or notes that this version of DeepSpeed lacks it."""
        if name in vars(owner):
            self.wrap(owner, name, *hooks, **options)
        else:
            self._engines.missing.append(f"{owner.__name__}.{name}")

    def _patch_copy(self, owner: Any, name: str, read_copies: Callable[..., Copied]) -> None:
        """Patches a method that copies gradients or parameters; *read_copies* returns the copies."""

        def copy_begins(optimizer: Any, *args: Any, **kwargs: Any) -> object:
            record = self._engines.by_optimizer(optimizer)
            if record is None or not (record.offloads_optimizer or record.offloads_params):
                return SKIP
            return read_copies(optimizer, record, *args, **kwargs), time.monotonic_ns()

        def copy_ends(state: tuple[Copied, int] | None, *_: Any) -> None:
            if state is None:
                return
            copied, started = state
            # on a device copies are asynchronous, and only their bytes are known
            copy_ns = 0 if accelerator.ready_device() is not None else time.monotonic_ns() - started
            for path, nbytes in copied:
                self.transfers.add(path, nbytes, copy_ns, copy_ns)

        self._patch_method(owner, name, copy_begins, copy_ends)

    def _patch_bucket(
        self,
        owner: Any,
        name: str,
        engine_of: Callable[[Any], Engine | None],
        is_filled: Callable[..., bool] = lambda *_: True,
    ) -> None:
        """Patches the reduction of one bucket, whose collectives get the bucket's unit."""
        context = self.context

        def bucket_begins(subject: Any, *args: Any, **_: Any) -> None:
            record = engine_of(subject)
            # The end of a backward reduces whatever is left, also nothing: that is no bucket
            if record is not None and is_filled(subject, *args):
                bucket = {"kind": "bucket", "engine": record.number}
                context.unit = context.unit_id(f"{record.prefix}bucket {record.bucket}", bucket)
                context.engine = record.number
                record.bucket += 1

        self._patch_method(owner, name, bucket_begins, active_from=ON, scoped=True, traced=True)


def has_gradient(optimizer: Any, comm_dtype: Any = None, *_: Any) -> bool:
    """Returns whether any bucket of *comm_dtype*, or of any dtype, holds a gradient."""
    buckets = optimizer.ipg_buckets
    chosen = buckets.values() if comm_dtype is None else (buckets[comm_dtype],)
    return any(bucket.params for bucket in chosen)
