"""The hooks on torch's pipelines: what they leave behind, and what a stage's calls write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules, stage

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import StageAction
from zeromon.ring.events import StageRun, decode_record
from zeromon_agents.hooks.backend import Units
from zeromon_agents.hooks.pipelining import MESSAGES, Pipelining
from zeromon_agents.observe.step import Steps
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import IDLE, ON, HookContext


class Base:
    """A stage as torch's base class is called."""

    stage_index, is_last, has_backward = 3, True, True
    device = torch.device("cpu")

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any = ()) -> str:
        return f"F{fwd_chunk_id}"

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True) -> str:
        return f"B{bwd_chunk_id}"

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        raise ValueError("the stage's own")


@pytest.fixture
def made(tmp_path: Path) -> tuple[Pipelining, HookContext, RingReader]:
    """The backend without the services that it does not use."""
    context = HookContext(RingWriter(tmp_path / "rank0.1.ring", rank=0, pid=1), Guard())
    context.mode = ON
    steps = Steps(context, lambda _: None, lambda: None)
    backend: Any = Pipelining.__new__(Pipelining)
    backend.context, backend.patches = context, Patches()
    backend.steps, backend.units = steps, Units(context)
    return backend, context, RingReader(tmp_path / "rank0.1.ring")


def written(reader: RingReader) -> list[tuple[StageAction, int, int]]:
    events = (decode_record(raw) for raw in reader.read(final=True))
    return [(e.action, e.stage, e.micro_batch) for e in events if isinstance(e, StageRun)]


def test_each_action_is_a_record_with_its_stage_and_micro_batch(
    made: tuple[Pipelining, HookContext, RingReader],
) -> None:
    backend, context, reader = made
    backend.watch_stage(SimpleNamespace(_PipelineStageBase=Base))
    one = Base()
    assert one.forward_one_chunk(2, args=()) == "F2"
    assert one.backward_one_chunk(2, loss=None, full_backward=True) == "B2"
    one.backward_one_chunk(4, full_backward=False)
    with pytest.raises(ValueError, match="the stage's own"):
        one.backward_weight_one_chunk(4, last_backward=True)
    context.mode = IDLE  # a control step
    one.forward_one_chunk(5)
    backend.patches.restore()
    assert written(reader) == [
        (StageAction.FORWARD, 3, 2),
        (StageAction.BACKWARD, 3, 2),
        (StageAction.BACKWARD_INPUT, 3, 4),
        (StageAction.BACKWARD_WEIGHT, 3, 4),
    ]
    assert context.guard.errors == 0


def test_what_a_device_or_an_evaluation_computes_is_not_timed(
    made: tuple[Pipelining, HookContext, RingReader],
) -> None:
    backend, _, reader = made
    backend.watch_stage(SimpleNamespace(_PipelineStageBase=Base))
    on_device, evaluating = Base(), Base()
    on_device.device = torch.device("cuda")
    evaluating.has_backward = False
    on_device.forward_one_chunk(0)
    evaluating.forward_one_chunk(0)
    backend.patches.restore()
    assert written(reader) == []


def test_nothing_of_torch_is_patched_after_the_end(
    made: tuple[Pipelining, HookContext, RingReader],
) -> None:
    backend, _, _ = made
    owners = (
        stage._PipelineStageBase, schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti,
        schedules._PipelineSchedule,
    )  # fmt: skip
    before = [dict(vars(owner)) for owner in owners]
    backend.watch_stage(stage)
    backend.watch_schedules(schedules)
    patched = vars(stage._PipelineStageBase)
    assert all(patched[name] is not before[0][name] for name in MESSAGES)
    assert backend.patches.restore() == []
    assert [dict(vars(owner)) for owner in owners] == before
