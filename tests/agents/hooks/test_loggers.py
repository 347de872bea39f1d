"""Loss, gradient norm and learning rate as loggers get them, and what a rank begins with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import Node, train_command
from torch import nn

from zeromon.diagnosis.engine import advise
from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Scalar
from zeromon.ring.events import decode_record
from zeromon_agents.hooks.deepspeed.steps import EngineSteps
from zeromon_agents.observe.batches import tensors_checksum
from zeromon_agents.observe.scalars import Scalars, scalar_of
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON, HookContext


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("loss", Scalar.LOSS), ("train/loss", Scalar.LOSS), ("Loss/train", Scalar.LOSS),
        ("train_loss_step", Scalar.LOSS), ("lm loss", Scalar.LOSS), ("train_loss_epoch", None),
        ("val_loss", None), ("eval/loss", None), ("loss/discriminator", None), ("loss_scale", None),
        ("grad_norm", Scalar.GRAD_NORM), ("train/Gradient-Norm", Scalar.GRAD_NORM),
        ("param_norm", None), ("norm", None), ("total_norm", None),
        ("lr", Scalar.LEARNING_RATE), ("Train/Samples/lr", Scalar.LEARNING_RATE),
        ("learning_rate", Scalar.LEARNING_RATE), ("lr-AdamW/pg2", None), ("tokens", None),
    ],
)  # fmt: skip
def test_names_that_loggers_use(name: str, means: Scalar | None) -> None:
    assert scalar_of(name) is means


def test_a_checksum_is_of_what_is_on_the_cpu_alone() -> None:
    same = [torch.arange(5000.0), torch.ones(3, 4)]
    assert tensors_checksum(same) == tensors_checksum([tensor.clone() for tensor in same])
    assert tensors_checksum(same) != tensors_checksum([torch.arange(5000.0).flip(0), torch.ones(3, 4)])
    assert tensors_checksum([torch.ones(9, dtype=torch.bfloat16)]) is not None
    assert tensors_checksum([torch.ones(2, device="meta")]) is tensors_checksum([]) is None
    assert tensors_checksum([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]) is None
    assert tensors_checksum([torch.ones(8, 8).t(), nn.Parameter(torch.ones(1))]) is not None


def made_context(folder: Path) -> HookContext:
    return HookContext(RingWriter(folder / "0.ring", rank=0, capacity=64), Guard())


def test_a_loss_without_a_value_of_its_own_is_left_alone(tmp_path: Path) -> None:
    """That of a backward within vmap; and numbers of loggers that are on a device."""
    context, steps = made_context(tmp_path), SimpleNamespace(on_loss=[])
    scalars = Scalars(context, steps)  # type: ignore[arg-type]

    def penalty(x: torch.Tensor) -> torch.Tensor:
        steps.on_loss[0]((x.sum(),))
        return x

    torch.func.vmap(penalty)(torch.ones(3, 2))
    steps.on_loss[0]((torch.tensor(float("nan"), device="meta"), torch.ones(2), None))
    context.mode = ON
    scalars.give_named("loss", torch.ones((), device="meta"))
    scalars.give_named(3, 1.0)
    assert context.guard.errors == 0
    assert RingReader(context.ring.path).read() == []


def test_the_learning_rate_is_of_the_first_optimizer_that_lives(tmp_path: Path) -> None:
    """A second one beside it does not count; in a sweep, the next one follows."""
    context = made_context(tmp_path)
    scalars = Scalars(context, SimpleNamespace(on_loss=[]))  # type: ignore[arg-type]
    optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr) for lr in (0.5, 0.25, 0.125)]
    context.mode = ON
    while optimizers:
        for optimizer in optimizers:
            scalars.optimizer_steps(optimizer)
        del optimizers[0], optimizer
    rates = [decode_record(raw) for raw in RingReader(context.ring.path).read(final=True)]
    assert [rate.value for rate in rates] == [0.5, 0.25, 0.125]  # type: ignore[union-attr]


def test_a_model_that_is_made_without_zero_init_is_built_whole(tmp_path: Path) -> None:
    """The bytes of the parameters that have no ``ds_id`` before the engine is made."""
    services: Any = SimpleNamespace(
        context=made_context(tmp_path),
        census=SimpleNamespace(take=None),
        steps=SimpleNamespace(initializing=0),
        device=None,
        transfers=None,
        scalars=None,
    )
    registered: list[Any] = []
    services.context.mode = ON
    engines: Any = SimpleNamespace(built_bytes={}, of=registered.append)
    steps = EngineSteps(services, engines)
    model, engine = nn.Linear(4, 4), SimpleNamespace(zero_optimization_stage=lambda: 3)
    assert steps.init_begins(engine, model=model) == 4 * (16 + 4)
    steps.init_ends(80, None, engine)
    assert engines.built_bytes == {id(engine): 80} and registered == [engine]
    for param in model.parameters():
        param.ds_id = 1  # type: ignore[attr-defined]
    assert steps.init_begins(engine, model=model) == 0


def test_a_loop_of_ones_own_tells_what_it_does_wrong(shared_node: Node) -> None:
    """Two ranks; each value where the program puts it, and each mistake with its rank and step."""
    result = shared_node.run(train_command(2, program="logged.py"))
    assert result.code == 0, result.output
    first, second = result.snapshot.ranks
    assert first.agent.errors == second.agent.errors == 0
    recent = {step.step: step for step in first.steps.recent}
    assert [recent[n].loss for n in (10, 49)] == [2.0 / 10, 2.0 / 49]  # not that of the validation
    assert {step.loss for step in second.steps.recent[:-4]} == {77.0}
    assert [recent[n].learning_rate for n in (1, 10, 11, 52)] == [0.01, 0.01, 0.005, 0.0003125]
    assert recent[39].grad_norm == pytest.approx(second.steps.recent[38].grad_norm)
    assert recent[40].grad_norm > 1000 * recent[39].grad_norm  # type: ignore[operator]
    assert recent[50].grad_norm is None
    assert first.config.process["clip_norm"] == 1.0
    findings = {finding.rule: finding for finding in advise(result.snapshot)}
    assert findings["not_finite"].rank == 1
    assert "in step 50, on rank 1 first" in findings["not_finite"].text
    assert "in step 40" in findings["grad_norm_spikes"].text
    assert "(0, 1) are the same (RandomSampler)" in findings["same_samples"].text
    said = findings["initial_parameters_differ"].text
    assert said == "rank 1 began with other parameters than rank 0"
    metrics = shared_node.metrics(result.run)
    assert metrics["zeromon_training_scalar"]["0", "learning_rate"] == 0.0003125
    assert metrics["zeromon_training_scalar_nonfinite_total"]["1", "loss"] == 3
