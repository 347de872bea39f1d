"""Which function folds which event: ``@folds(EventType)`` registers it."""

from collections.abc import Callable
from typing import Any, TypeVar

from zeromon.fold.state import RankState
from zeromon.ring.events import Event

_E = TypeVar("_E", bound=Event)
_Handler = Callable[[RankState, _E], None]

HANDLERS: dict[type, Callable[[RankState, Any], None]] = {}
"""Type of an event -> the function that changes a state by it."""


def folds(event: type[_E]) -> Callable[[_Handler[_E]], _Handler[_E]]:
    """Registers the function below as the one that folds every *event*."""

    def register(handler: _Handler[_E]) -> _Handler[_E]:
        HANDLERS[event] = handler
        return handler

    return register
