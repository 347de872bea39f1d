"""Installs the hooks on DeepSpeed's classes."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from zeromon_agents.hooks.backend import Backend, ImportHook, Services
from zeromon_agents.hooks.deepspeed import copies, names
from zeromon_agents.hooks.deepspeed.copies import Copied, Copies
from zeromon_agents.hooks.deepspeed.engines import Engine, Engines
from zeromon_agents.hooks.deepspeed.gathers import Gathers
from zeromon_agents.hooks.deepspeed.steps import EngineSteps
from zeromon_agents.observe.census import Provider
from zeromon_agents.observe.offload import BUILDERS, Disk
from zeromon_agents.runtime.around import around
from zeromon_agents.runtime.hook_context import IDLE, OFF, ON


class DeepSpeed(Backend):
    """The hooks on DeepSpeed's classes."""

    classes = ((names.ENGINE, "DeepSpeedEngine"),)

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._engines = Engines(services.context)
        self._gathers = Gathers(services.context, self._engines, services.transfers)
        self._engine_steps = EngineSteps(services, self._engines, self._gathers)

    def hooks(self) -> Iterable[ImportHook]:
        """Patches the engine, the ZeRO optimizers, the coordinator and the disk operators."""
        return (
            (names.ENGINE, self._watch_engine),
            (names.COORDINATOR, self._watch_coordinator),
            (names.STAGE_1_AND_2, self._watch_stage_1_and_2),
            (names.STAGE_3, self._watch_stage_3),
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
        """Returns the label of a group in ``deepspeed.utils.groups``."""
        return names.group_label(pg)

    # ---- installation -------------------------------------------------------------------------

    def _watch_engine(self, module: Any) -> None:
        engine, steps = module.DeepSpeedEngine, self._engine_steps
        patch = partial(self._patch, engine)
        patch("__init__", steps.init_begins, steps.init_ends, active_from=OFF)
        patch("forward", steps.forward_begins, steps.forward_ends, scoped=True, traced=True)
        patch("backward", steps.backward_begins, steps.backward_ends, scoped=True, traced=True)
        patch("_take_model_step", steps.step_begins, steps.step_ends, scoped=True)
        self._patch_bucket(engine, "allreduce_bucket", self._engines.of)

    def _watch_coordinator(self, module: Any) -> None:
        gathers = self._gathers
        gathers.not_available = module.ZeroParamStatus.NOT_AVAILABLE
        patch = partial(
            self._patch, module.PartitionedParameterCoordinator, active_from=ON, traced=True
        )
        patch("fetch_sub_module", gathers.fetch_begins, gathers.fetch_ends, scoped=True)
        patch("release_sub_module", None, gathers.release_ends)
        patch(names.GATHER, gathers.gather_begins, gathers.gather_ends, scoped=True)

    def _watch_stage_1_and_2(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer
        self._patch_bucket(optimizer, "reduce_ipg_grads", self._engines.by_optimizer, filled)
        self._patch_copy(
            optimizer, "async_inplace_copy_grad_to_fp32_buffer_from_gpu", copies.gradient_offloaded
        )
        self._patch_copy(
            optimizer, "async_accumulate_grad_in_cpu_via_gpu", copies.gradient_accumulated
        )

    def _watch_stage_3(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer_Stage3
        self._patch_bucket(optimizer, names.REDUCE_3, self._engines.by_optimizer, filled_3)
        self._patch(
            optimizer, "_post_step", self._gathers.persistent_begins, scoped=True, active_from=ON
        )
        self._patch_copy(optimizer, "partition_grads", copies.gradients_partitioned)
        self._patch_copy(
            optimizer, "_reassign_or_swap_out_partitioned_parameters", copies.parameters_updated
        )

    def _patch(
        self,
        owner: Any,
        name: str,
        before: Callable[..., Any] | None,
        after: Callable[..., None] | None = None,
        *,
        active_from: int = IDLE,
        scoped: bool = False,
        traced: bool = False,
    ) -> None:
        """Patches a method, or notes that this version of DeepSpeed lacks it."""
        if name not in vars(owner):
            self._engines.missing.append(f"{owner.__name__}.{name}")
            return
        # fmt: off
        hook = around(self.context, before, after,
                      active_from=active_from, scoped=scoped, traced=traced)
        # fmt: on
        self.patches.wrap(owner, name, hook)

    def _patch_copy(self, owner: Any, name: str, read: Callable[..., Copied]) -> None:
        copied = Copies(self._engines, self.transfers, read)
        self._patch(owner, name, copied.begins, copied.ends)

    def _patch_bucket(
        self,
        owner: Any,
        name: str,
        engine_of: Callable[[Any], Engine | None],
        is_filled: Callable[..., bool] = lambda *_: True,
    ) -> None:
        """Patches the reduction of one bucket, whose collectives get the bucket's unit."""
        context = self.context

        def begins(subject: Any, *args: Any, **_: Any) -> None:
            known = engine_of(subject)
            if known is not None and is_filled(subject, *args):
                bucket = {"kind": "bucket", "engine": known.number}
                context.unit = context.unit_id(f"{known.prefix}bucket {known.bucket}", bucket)
                context.engine = known.number
                known.bucket += 1

        self._patch(owner, name, begins, active_from=ON, scoped=True, traced=True)


def filled(optimizer: Any, comm_dtype: Any = None, *_: Any) -> bool:
    """Stages 1 and 2: whether any bucket of *comm_dtype*, or of any dtype, holds a gradient."""
    buckets = optimizer.ipg_buckets
    chosen = buckets.values() if comm_dtype is None else (buckets[comm_dtype],)
    return any(bucket.params for bucket in chosen)


def filled_3(optimizer: Any, communication_data_type: Any, *_: Any) -> bool:
    """Stage 3: whether the bucket of *communication_data_type* holds a gradient."""
    return bool(optimizer.ipg_buckets[communication_data_type].params)
