"""When the first step begins: not before the batch or the forward that leads to a backward."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from support import Node, train_command

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Flag, Phase
from zeromon.ring.events import PhaseSpan, Start, StepMark, decode_record, pack_head
from zeromon_agents.observe.process_metadata import process_start_ns
from zeromon_agents.observe.step import Steps
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON, HookContext

PAUSE_S = 0.03


@pytest.fixture
def loop(tmp_path: Path) -> tuple[Steps, RingReader]:
    """Set-up has taken a while when the first batch is asked for."""
    context = HookContext(RingWriter(tmp_path / "rank0.1.ring", rank=0, pid=1), Guard())
    context.mode = ON
    steps = Steps(context, lambda _: None, lambda: None)
    time.sleep(PAUSE_S)
    return steps, RingReader(tmp_path / "rank0.1.ring")


def one_step(steps: Steps, *, wrapped: bool, loaded: bool) -> None:
    if loaded:
        steps.data_begins()
        time.sleep(PAUSE_S)
        steps.data_ends()
    if wrapped:
        steps.forward_begins()
        steps.forward_ends()
    steps.backward_begins()
    steps.backward_ends()
    steps.optimizer_begins(None)
    steps.optimizer_ends(None)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_startup_is_not_in_the_first_step(
    loop: tuple[Steps, RingReader], wrapped: bool, loaded: bool
) -> None:
    steps, reader = loop
    made = time.monotonic_ns()
    one_step(steps, wrapped=wrapped, loaded=loaded)
    one_step(steps, wrapped=wrapped, loaded=loaded)
    events = [decode_record(raw) for raw in reader.read(final=True)]
    starts = [event for event in events if isinstance(event, Start)]
    first, second = [event for event in events if isinstance(event, StepMark)]
    assert first.start_ns == starts[-1].t_ns >= made + loaded * PAUSE_S * 1e9
    assert second.start_ns == first.t_ns
    assert starts[0].process_start_ns == process_start_ns() < made
    assert len(starts) == (wrapped + loaded or 1)
    spans = [event for event in events if isinstance(event, PhaseSpan)]
    assert all(one.start_ns >= made for one in spans)


def test_optimizers_that_step_within_backward_are_a_part_of_it(loop: tuple[Steps, RingReader]) -> None:
    """A hook of each gradient steps its own optimizer: one step a backward, which all of them are in."""
    steps, reader = loop
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    phases: list[Phase] = []
    for _ in range(2):
        steps.forward_begins()
        steps.forward_ends()
        steps.backward_begins()
        for optimizer in optimizers:
            steps.optimizer_begins(optimizer)
            steps.optimizer_ends(optimizer)
            phases.append(steps._context.phase)
        steps.backward_ends()
    events = [decode_record(raw) for raw in reader.read(final=True)]
    marks = [event for event in events if isinstance(event, StepMark)]
    assert [(mark.step, mark.micro_steps) for mark in marks] == [(1, 1), (2, 1)]
    assert set(phases) == {Phase.BACKWARD}
    ends = [
        event.t_ns for event in events if isinstance(event, PhaseSpan) and event.phase is Phase.BACKWARD
    ]
    assert all(end <= mark.t_ns for end, mark in zip(ends, marks, strict=True))
    assert steps.updates_in_backward


def test_an_evaluation_before_the_training_is_startup(loop: tuple[Steps, RingReader]) -> None:
    steps, reader = loop
    steps.forward_begins()
    time.sleep(PAUSE_S)
    steps.forward_ends()
    evaluated = time.monotonic_ns()
    one_step(steps, wrapped=True, loaded=False)
    (first,) = [e for raw in reader.read(final=True) if isinstance(e := decode_record(raw), StepMark)]
    assert first.start_ns >= evaluated


def test_after_an_attach_nothing_is_known_of_the_startup(loop: tuple[Steps, RingReader]) -> None:
    steps, reader = loop
    steps.attached_mid_step = True
    for _ in range(3):
        one_step(steps, wrapped=True, loaded=True)
        assert steps._context.head_word == pack_head(0, phase=Phase.OTHER)  # that of collectives now
    assert not [e for raw in reader.read(final=True) if isinstance(e := decode_record(raw), Start)]


def test_a_schedule_of_micro_batches_is_one_micro_step(loop: tuple[Steps, RingReader]) -> None:
    """Forwards and backwards alternate, and a forward does not begin the first step again."""
    steps, reader = loop
    steps.pipeline_begins(None, (), {})
    for _ in range(2):
        steps.forward_begins()
        time.sleep(PAUSE_S)
        steps.forward_ends()
    for _ in range(3):
        steps.backward_begins()
        steps.backward_begins()  # autograd's, inside of the stage's
        steps.backward_ends()
        steps.backward_ends()
    steps.pipeline_ends()
    assert steps.micro_steps == 1
    events = [decode_record(raw) for raw in reader.read(final=True)]
    assert sum(isinstance(event, Start) for event in events) == 1
    backwards = [e for e in events if isinstance(e, PhaseSpan) and e.phase is Phase.BACKWARD]
    assert [bool(e.flags & Flag.CONTINUED) for e in backwards] == [False, True, True]
    steps.backward_begins()
    steps.backward_ends()
    assert steps.micro_steps == 2


def test_what_a_pipeline_infers_shapes_from_is_no_loss(loop: tuple[Steps, RingReader]) -> None:
    """Since torch 2.13 its first step calls autograd with a loss of uninitialized memory."""
    steps, _ = loop
    losses: list[object] = []
    steps.on_loss.append(losses.append)
    steps.pipeline_begins(None, (), {})
    steps.backward_begins((torch.tensor(float("nan")),))
    steps.backward_ends()
    steps.pipeline_ends()
    assert losses == [()]


@pytest.mark.parametrize(("loaded", "expected"), [(True, Phase.FORWARD), (False, Phase.OTHER)])
def test_a_later_micro_step_without_a_wrapper_is_forward_from_its_batch(
    loop: tuple[Steps, RingReader], loaded: bool, expected: Phase
) -> None:
    """Without a batch nothing tells it from what comes before the optimizer."""
    steps, _ = loop
    one_step(steps, wrapped=False, loaded=loaded)
    assert steps._context.phase == Phase.FORWARD
    steps.backward_begins()
    steps.backward_ends()
    assert steps._context.phase == Phase.OTHER
    if loaded:
        steps.data_begins()
        steps.data_ends()
    assert steps._context.phase == expected


@pytest.mark.parametrize("wrapped", [True, False])
def test_batches_without_gradients_between_steps_are_an_evaluation(
    loop: tuple[Steps, RingReader], wrapped: bool
) -> None:
    """Many scripts validate under no_grad() and never call eval(): that was other and forward."""
    steps, reader = loop
    ended: list[tuple[int, int]] = []
    steps.evaluation.on_end = lambda begin, end: ended.append((begin, end))
    one_step(steps, wrapped=wrapped, loaded=True)
    asked = time.monotonic_ns()
    for _ in range(2):
        with torch.no_grad():
            steps.data_begins()
            steps.data_ends()
            if wrapped:
                steps.forward_begins()
                steps.forward_ends()
    one_step(steps, wrapped=wrapped, loaded=True)
    assert len(ended) == 2
    assert asked <= ended[0][0] < ended[0][1] == ended[1][0] < ended[1][1]
    one_step(steps, wrapped=wrapped, loaded=True)
    assert len(ended) == 2
    del reader


def test_a_teacher_within_a_step_is_no_evaluation(loop: tuple[Steps, RingReader]) -> None:
    steps, _ = loop
    ended: list[tuple[int, int]] = []
    steps.evaluation.on_end = lambda begin, end: ended.append((begin, end))
    for _ in range(3):
        steps.data_begins()
        steps.data_ends()
        with torch.no_grad():
            steps.forward_begins(steps, (), {})
            steps.forward_ends()
        one_step(steps, wrapped=True, loaded=False)
    assert ended == []


def test_batches_whose_forward_alone_has_no_gradients_are_an_evaluation(
    loop: tuple[Steps, RingReader],
) -> None:
    steps, _ = loop
    ended: list[tuple[int, int]] = []
    steps.evaluation.on_end = lambda begin, end: ended.append((begin, end))
    one_step(steps, wrapped=True, loaded=True)
    for _ in range(3):
        steps.data_begins()
        steps.data_ends()
        with torch.inference_mode():
            steps.forward_begins(steps, (), {})
            steps.forward_ends()
    one_step(steps, wrapped=True, loaded=True)
    assert len(ended) == 3


def test_the_batches_of_an_evaluation_with_eval_do_not_count_twice(
    loop: tuple[Steps, RingReader],
) -> None:
    steps, _ = loop
    ended: list[tuple[int, int]] = []
    steps.evaluation.on_end = lambda begin, end: ended.append((begin, end))
    one_step(steps, wrapped=True, loaded=True)
    model = torch.nn.Linear(1, 1)
    steps.evaluation.begins(model)
    with torch.no_grad():
        steps.data_begins()
        steps.data_ends()
        steps.forward_begins(steps, (), {})
        steps.forward_ends()
    model.train()
    one_step(steps, wrapped=True, loaded=True)
    assert len(ended) == 1


def test_a_program_that_only_evaluates_ends_with_its_last_forward(
    loop: tuple[Steps, RingReader],
) -> None:
    """Inference alone: no call of ``train()`` ends it, and no step."""
    steps, _ = loop
    ended: list[tuple[int, int]] = []
    steps.evaluation.on_end = lambda begin, end: ended.append((begin, end))
    for forwards in (0, 3):
        steps.evaluation.begins(torch.nn.Linear(1, 1))
        with torch.no_grad():
            for _ in range(forwards):
                steps.forward_begins(steps, (), {})
                steps.forward_ends()
        last_ns = time.monotonic_ns()
        steps.evaluation.training_ends()
    assert len(ended) == 1 and ended[0][0] < ended[0][1] <= last_ns


@pytest.mark.parametrize("evaluations", [1, 2, 7])
def test_a_closure_of_the_optimizer_is_one_micro_step(
    loop: tuple[Steps, RingReader], evaluations: int
) -> None:
    """L-BFGS evaluates loss and gradients again and again; nothing is accumulated."""
    steps, reader = loop
    for _ in range(2):
        steps.optimizer_begins(None)
        for _ in range(evaluations):
            steps.forward_begins()
            steps.forward_ends()
            steps.backward_begins()
            steps.backward_ends()
            assert steps._context.phase == Phase.OPTIMIZER
        steps.optimizer_ends(None)
    events = [decode_record(raw) for raw in reader.read(final=True)]
    assert [one.micro_steps for one in events if isinstance(one, StepMark)] == [1, 1]
    counted = [e for e in events if isinstance(e, PhaseSpan) and e.phase is Phase.BACKWARD
               and not e.flags & Flag.CONTINUED]  # fmt: skip
    assert len(counted) == 2


def test_steps_of_the_next_model_are_seen_without_an_optimizer_hook(
    loop: tuple[Steps, RingReader],
) -> None:
    """A sweep: the model whose parameters were watched is gone."""
    steps, reader = loop
    for _ in range(2):
        model = torch.nn.Linear(1, 1)
        for _ in range(3):
            steps.forward_begins(model, (), {})
            steps.forward_ends()
            steps.backward_begins()
            steps.backward_ends()
            with torch.no_grad():
                model.weight.add_(1)
    steps.end_unhooked_step()
    events = [decode_record(raw) for raw in reader.read(final=True)]
    assert [event.step for event in events if isinstance(event, StepMark)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("hooked", [True, False])
def test_an_attach_during_an_optimizer_does_not_lose_its_count(
    loop: tuple[Steps, RingReader], hooked: bool
) -> None:
    """Its hooks come too late for the step under way; an optimizer that calls none has none."""
    steps, reader = loop
    steps.attached_mid_step = True
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(45):
        model(torch.ones(1, 1)).sum().backward()
        is_seen = number >= 41
        if is_seen:
            steps.forward_begins(model, (), {})
            steps.forward_ends()
            steps.backward_begins()
            steps.backward_ends()
        if hooked and number > 41:
            steps.optimizer_begins(optimizer)
        optimizer.step()
        if hooked and number > 41:
            steps.optimizer_ends(optimizer)
    steps.end_unhooked_step()
    events = [decode_record(raw) for raw in reader.read(final=True)]
    numbers = [event.step for event in events if isinstance(event, StepMark)]
    assert numbers == ([44, 45] if hooked else [1, 2])


def test_a_request_that_brings_no_batch_is_marked(loop: tuple[Steps, RingReader]) -> None:
    """The DataLoader of this rank has no more, while others may have."""
    steps, reader = loop
    patches = Patches()
    steps.watch_data(torch.utils.data.dataloader, patches)
    try:
        batches = list(torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2))  # type: ignore[arg-type]
    finally:
        patches.restore()
    spans = [e for r in reader.records() if isinstance(e := decode_record(r), PhaseSpan)]
    asked = [bool(e.flags & Flag.FAILED) for e in spans if e.phase is Phase.DATA_WAIT]
    assert (len(batches), asked) == (2, [False, False, True])


class Autocasting(torch.nn.Module):
    """A model that opens autocast itself, as accelerate makes it do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(inputs).float()


def test_autocast_within_the_model_is_seen_and_changes_no_result(tmp_path: Path) -> None:
    context = HookContext(RingWriter(tmp_path / "rank0.1.ring", rank=0, pid=1), Guard())
    context.mode = ON
    steps = Steps(context, lambda _: None, lambda: None, device_type="cpu")
    model, inputs, entry = Autocasting(), torch.randn(4, 8), torch.autocast.__enter__
    plain = model(inputs)
    steps.watch_autocast(torch.amp.autocast_mode)
    try:
        with torch.autocast("cpu", enabled=False):
            steps.forward_begins(model, (inputs,))
        assert steps.autocast is None, "one that is off, as in rotary embeddings, is none"
        watched, compiled = model(inputs), torch.compile(model, backend="eager")(inputs)
    finally:
        autocast = steps.leave_autocast()
    assert autocast == "bfloat16"
    assert torch.equal(plain, watched) and torch.equal(plain, compiled)
    assert torch.autocast.__enter__ is entry


@pytest.mark.trains
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.fsdp2)])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_compiled_optimizer_calls_no_hook_and_its_steps_are_counted(
    node: Node, strategy: str, micro_steps: int
) -> None:
    words = (strategy, "6", str(micro_steps))
    result = node.run(train_command(2, *words, program="compiled_optimizer.py"))
    assert result.code == 0, result.output
    for rank in result.snapshot.ranks:
        assert (rank.steps.watched_steps, rank.agent.errors) == (6, 0)
        assert [step.micro_steps for step in rank.steps.recent] == [micro_steps] * 6
        assert rank.steps.phase_seconds["optimizer"] > 0
