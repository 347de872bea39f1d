"""How many steps a training takes: a trainer's goal, else the epochs of a DataLoader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zeromon_agents.hooks.loggers import Loggers
from zeromon_agents.observe.process_metadata import Goal


class Context:
    """Stands for the hook context."""

    step = 0

    def __init__(self) -> None:
        self.goals: list[dict[str, Any]] = []

    def add_metadata(self, goal: dict[str, Any]) -> None:
        self.goals.append(goal)


class Iterator:
    """Of a DataLoader with ten batches."""

    def __len__(self) -> int:
        return 10


class Endless:
    """Of an iterable data set."""

    def __len__(self) -> int:
        raise TypeError


def test_epochs_are_known_as_long_as_each_is_taken_to_its_end() -> None:
    context = Context()
    goal = Goal(context)  # type: ignore[arg-type]
    first, second, third = Iterator(), Iterator(), Iterator()
    goal.batch_trained(first)
    goal.batch_trained(first)
    goal.iterator_ended(Iterator())  # of an evaluation
    goal.iterator_ended(first)
    context.step = 10
    goal.batch_trained(second)
    goal.batch_trained(third)  # the second was left before its end
    goal.batch_trained(Iterator())
    by = {"batches": 10, "by": "DataLoader"}
    assert context.goals == [by | {"before": 0}, by | {"before": -10}, {}]
    assert not any((Goal(context).batch_trained(Endless()), context.goals[-1]))  # type: ignore[arg-type]


def test_a_trainers_goal_counts_the_steps_before_a_restart() -> None:
    context = Context()
    hooks = Loggers.__new__(Loggers)
    hooks.steps = SimpleNamespace(goal=Goal(context))  # type: ignore[arg-type, assignment]
    hooks._hf_begins(None, None, SimpleNamespace(max_steps=500, global_step=200))
    trainer = SimpleNamespace(
        max_steps=-1, num_training_batches=25, max_epochs=3, accumulate_grad_batches=4, global_step=0
    )
    hooks._fit_begins(SimpleNamespace(trainer=trainer))
    trainer.max_steps, context.step = 5, 1
    hooks._fit_begins(SimpleNamespace(trainer=trainer))
    hooks.steps.goal.batch_trained(Iterator())
    trainer.max_steps, trainer.num_training_batches = -1, float("inf")
    hooks._fit_begins(SimpleNamespace(trainer=trainer))
    assert context.goals == [
        {"steps": 500, "before": 200, "by": "Trainer"},
        {"steps": 21, "before": 0, "by": "Lightning"},
        {"steps": 5, "before": -1, "by": "Lightning"},
    ]
