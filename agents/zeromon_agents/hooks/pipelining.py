"""torch.distributed.pipelining: what each stage computes for each micro-batch, and the schedule.

A stage calls one of three methods for each action of its schedule, whatever the schedule. The order of
the calls is the schedule's own table of actions. Private names of torch that the hooks use stand here;
each has a canary test. DeepSpeed's PipelineEngine runs instructions from a table of its own instead.
"""

import time
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from zeromon.ring.codes import Kind, StageAction
from zeromon_agents.hooks.backend import Backend, ImportHook
from zeromon_agents.hooks.dimensions import STAGE
from zeromon_agents.runtime.around import SKIP, around
from zeromon_agents.runtime.hook_context import ON

SCHEDULES = "torch.distributed.pipelining.schedules"
MESSAGES = ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops")
"""The stage methods that the schedules call before they send or receive."""

ENGINE = "deepspeed.runtime.pipe.engine"
# Of DeepSpeed's instructions; the others send, receive or reduce
_LOAD, _BACKWARD = "LoadMicroBatch", "BackwardPass"
_COMPUTES = {"ForwardPass": StageAction.FORWARD, _BACKWARD: StageAction.BACKWARD}

_MAX_SCHEDULES = 32


class Begun(NamedTuple):
    """An action of a stage that has begun."""

    action: StageAction
    stage: Any
    micro_batch: int
    start_ns: int


class Pipelining(Backend):
    """The hooks on stages and schedules."""

    _written: dict[str, Any] | None = None
    _number = 0
    """The number of the schedule that was described last."""
    _models: Iterable[weakref.ref[Any]] = ()
    """Those of its stages that were registered here."""
    _chunks: dict[str, int] | None = None
    """The forwards and backwards that have ended in DeepSpeed's batch; None outside of one."""

    def hooks(self) -> Iterable[ImportHook]:
        """Patches stages and schedules."""
        return (
            (STAGE, self.watch_stage), (SCHEDULES, self.watch_schedules), (ENGINE, self.watch_engine),
        )  # fmt: skip

    def watch_stage(self, module: Any) -> None:
        """Patches the base class of all stages."""
        computes = {
            "forward_one_chunk": self._forward_begins,
            "backward_one_chunk": self._backward_begins,
            "backward_weight_one_chunk": self._weight_begins,
        }
        for name, begin_hook in computes.items():
            hook = around(self.context, begin_hook, self._ends)
            self.patches.wrap_in(module._PipelineStageBase, name, hook)
        for name in MESSAGES:
            place_hook = around(self.context, self._place)
            self.patches.wrap_in(module._PipelineStageBase, name, place_hook)

    def watch_schedules(self, module: Any) -> None:
        """Patches the two base classes whose ``step`` the script calls, and the loss."""
        # Scoped: `_place` sets the unit of a stage, and nothing else takes it back
        step = around(self.context, self._call_begins, self._call_ends, scoped=True)
        for owner in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
            self.patches.wrap_in(owner, "step", step)
        loss = around(self.context, self._loss_begins, self._ends)
        self.patches.wrap_in(module._PipelineSchedule, "_maybe_compute_loss", loss)

    def watch_engine(self, module: Any) -> None:
        """Patches DeepSpeed's pipeline: its instructions are methods in a table."""
        engine = module.PipelineEngine
        batch = around(self.context, self._batch_begins, self._batch_ends, scoped=True)
        self.patches.wrap(engine, "train_batch", batch)
        table = dict(engine._INSTRUCTION_MAP)
        for instruction, method in table.items():
            begin_hook = partial(self._instruction_begins, instruction.__name__)
            table[instruction] = around(self.context, begin_hook, self._instruction_ends)(method)
        self.patches.set(engine, "_INSTRUCTION_MAP", table)

    # ---- one call of a schedule ----------------------------------------------------------------

    def _call_begins(self, schedule: Any, *args: Any, **kwargs: Any) -> object:
        self.steps.pipeline_begins(schedule, args, kwargs)
        if not schedule._has_backward:  # an evaluation
            return None
        if self._write_description(describe_schedule(schedule)):
            # The models that no wrapper registers, in place of those before
            self.models.forget(module for ref in self._models if (module := ref()) is not None)
            modules = [stage.submod for stage in _rank_stages(schedule) if not _is_wrapped(stage.submod)]
            for module in modules:
                self.models.register_module(module)
            self._models = [weakref.ref(module) for module in modules]
        return time.monotonic_ns()

    def _write_description(self, described: dict[str, Any]) -> bool:
        """Writes a description; returns whether it is new."""
        # Each description stays in the name table, and a script may make schedules without end
        is_new = described != self._written and self._number < _MAX_SCHEDULES
        if is_new:
            self._written = described
            self._number += 1
            self.context.add_metadata(pipeline=described)
        return is_new

    def _call_ends(self, from_ns: int | None, _: Any, schedule: Any, *__: Any) -> None:
        self._end_call(from_ns, schedule._n_microbatches)

    def _end_call(self, from_ns: int | None, micro_batches: int) -> None:
        self.steps.pipeline_ends()
        if from_ns is not None and self.context.mode == ON:
            self.context.emit(Kind.STAGE, from_ns, self._number, micro_batches, op=StageAction.CALL)

    # ---- DeepSpeed ----------------------------------------------------------------------------

    def _batch_begins(self, engine: Any, *_: Any, **__: Any) -> int:
        self.steps.pipeline_begins(engine, (), {})
        self._write_description(describe_engine(engine))
        self._chunks = {}
        return time.monotonic_ns()

    def _batch_ends(self, from_ns: int | None, _: Any, engine: Any, *__: Any) -> None:
        self._chunks = None
        self._end_call(from_ns, engine.micro_batches)

    def _instruction_begins(
        self, name: str, engine: Any, buffer_id: int = 0, *_: Any, **__: Any
    ) -> object:
        if self._chunks is None:  # an evaluation, or the agent came within a batch
            return SKIP
        self.context.unit = self.context.unit_id(f"stage {engine.stage_id}", {"kind": "pipeline"})
        # The engine's own hook is around the backward of the last stage alone
        if name == _BACKWARD and not engine.is_last_stage():
            self.steps.backward_begins()
        return name, buffer_id, time.monotonic_ns()

    def _instruction_ends(
        self, opening: tuple[str, int, int] | None, _: Any, engine: Any, *__: Any
    ) -> None:
        if opening is None or self._chunks is None:
            return
        name, buffer_id, start_ns = opening
        if name == _LOAD and engine.is_first_stage():
            self.steps.batches.received(id(engine), (engine.pipe_buffers["inputs"][buffer_id],), {})
        if name in _COMPUTES:
            action, chunk = _COMPUTES[name], self._chunks.get(name, 0)
            if self.context.mode == ON and engine.device.type == "cpu":
                self.context.emit(Kind.STAGE, start_ns, engine.stage_id, chunk, op=action)
            self._chunks[name] = chunk + 1
        if name == _BACKWARD and not engine.is_last_stage():
            self.steps.backward_ends()

    # ---- one action ---------------------------------------------------------------------------

    def _forward_begins(self, stage: Any, chunk: int, *_: Any, **__: Any) -> Begun:
        self._place(stage)
        self.steps.forward_begins()
        return Begun(StageAction.FORWARD, stage, chunk, time.monotonic_ns())

    def _loss_begins(
        self, schedule: Any, stage: Any, _output: Any, _targets: Any, chunk: int, *_: Any, **__: Any
    ) -> object:
        """The loss belongs to the forward of the last stage."""
        if not stage.is_last or schedule._loss_fn is None:
            return SKIP
        return self._forward_begins(stage, chunk)

    def _backward_begins(
        self, stage: Any, chunk: int, loss: Any = None, full_backward: bool = True, *_: Any, **__: Any
    ) -> Begun:
        action = StageAction.BACKWARD if full_backward else StageAction.BACKWARD_INPUT
        return self._gradients_begin(action, stage, chunk)

    def _weight_begins(self, stage: Any, chunk: int, *_: Any, **__: Any) -> Begun:
        return self._gradients_begin(StageAction.BACKWARD_WEIGHT, stage, chunk)

    def _gradients_begin(self, action: StageAction, stage: Any, chunk: int) -> Begun:
        self._place(stage)
        self.steps.backward_begins()
        return Begun(action, stage, chunk, time.monotonic_ns())

    def _ends(self, opening: Begun | None, *_: Any) -> None:
        if opening is None:
            return
        action, stage, chunk, start_ns = opening
        # the host sees only the launch of what a device computes
        if self.context.mode == ON and stage.has_backward and stage.device.type == "cpu":
            self.context.emit(Kind.STAGE, start_ns, stage.stage_index, chunk, op=action)
        if action is StageAction.FORWARD:
            self.steps.forward_ends()
        else:
            self.steps.backward_ends()

    def _place(self, stage: Any, *_: Any, **__: Any) -> None:
        """Assigns to *stage* what is sent, received or reduced from here on."""
        self.context.unit = self.units.id_of(
            stage, lambda s: (f"stage {s.stage_index}", {"kind": "pipeline"})
        )


def _is_wrapped(module: Any) -> bool:
    """Returns whether FSDP wraps the module or a part of it: its hooks register what it wraps."""
    return any(
        hasattr(child, "_get_fsdp_state") or hasattr(child, "_handle") for child in module.modules()
    )


def _rank_stages(schedule: Any) -> list[Any]:
    """Returns the stages of this rank."""
    return getattr(schedule, "_stages", None) or [schedule._stage]


def describe_schedule(schedule: Any) -> dict[str, Any]:
    """Returns the metadata of a schedule; ``stage_ranks``: the global rank of each stage."""
    stages = _rank_stages(schedule)
    group = stages[0].group or torch.distributed.group.WORLD
    ranks = torch.distributed.get_process_group_ranks(group)
    placed = stages[0].stage_index_to_group_rank
    return {
        "schedule": type(schedule).__name__.removeprefix("Schedule"),
        "stages": schedule._num_stages,
        "micro_batches": schedule._n_microbatches,
        "stage_ranks": [ranks[placed[stage]] for stage in sorted(placed)],
        "device": stages[0].device.type,
    }


def describe_engine(engine: Any) -> dict[str, Any]:
    """Returns the metadata of DeepSpeed's PipelineEngine, whose only schedule of training is 1F1B."""
    return {
        "schedule": "1F1B",
        "stages": engine.num_stages,
        "micro_batches": engine.micro_batches,
        "stage_ranks": list(engine.grid.pp_group),
        "device": engine.device.type,
    }
