"""How many steps the training will take, where something in the process says so."""

import weakref
from typing import Any

from zeromon.ring.model_metadata import GoalMetadata
from zeromon_agents.runtime.hook_context import HookContext

_MOST_EPOCHS = 256


class Goal:
    """The goal that a trainer has told, else the batches of the DataLoader's epoch."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._trainer_told = False
        self._iterator: Any = None
        """A weak reference to the iterator of the epoch under way."""
        self._is_over = True
        self._epochs = 0

    def tell(self, steps: int, taken: int, by: str) -> None:
        """Writes that the trainer *by*, which has taken *taken* steps, ends after *steps*."""
        if steps > 0:
            self._trainer_told = True
            self._write({"steps": steps, "before": taken - self._context.step, "by": by})

    def batch_trained(self, iterator: Any) -> None:
        """Writes the length of an epoch at its first backward.

        A script that leaves an iterator before its end does not train whole epochs.
        """
        if self._trainer_told or self._epochs >= _MOST_EPOCHS:
            return
        if iterator is None or (self._iterator is not None and self._iterator() is iterator):
            return
        self._epochs = self._epochs + 1 if self._is_over else _MOST_EPOCHS
        self._iterator, self._is_over = weakref.ref(iterator), False
        batches = _batches(iterator)
        if batches and self._epochs < _MOST_EPOCHS:
            self._write({"batches": batches, "before": -self._context.step, "by": "DataLoader"})
        else:
            self._write({})

    def iterator_ended(self, iterator: Any) -> None:
        """Notes that an iterator has no more batches."""
        if self._iterator is not None and self._iterator() is iterator:
            self._is_over = True

    def _write(self, goal: GoalMetadata) -> None:
        self._context.add_metadata(goal=goal)


def _batches(iterator: Any) -> int:
    try:
        return len(iterator)
    except (TypeError, AttributeError, NotImplementedError):
        return 0  # an iterable data set has no length
