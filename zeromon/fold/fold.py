"""Folds the events of a ring into the state of a rank, for the live view, replay and report alike.

:func:`fold` changes a :class:`~zeromon.fold.state.RankState` by one event, in place, because a node
folds tens of thousands of events a second. :func:`~zeromon.fold.summarize.summarize` makes a frozen
snapshot of a state. The fold reads no clock and no file.
"""

from __future__ import annotations

# each of these modules registers its handlers when it is imported
from zeromon.fold import (
    agent as agent,
    collectives as collectives,
    ddp as ddp,
    memory as memory,
    pipeline as pipeline,
    steps as steps,
    units as units,
)
from zeromon.fold.registry import HANDLERS
from zeromon.fold.state import RankState
from zeromon.ring.events import Event, GroupSequence, Heartbeat, HostSample, MemorySample

_NO_PROGRESS = frozenset((GroupSequence, Heartbeat, HostSample, MemorySample))
"""What the heartbeat's thread writes, also while the training thread stands still."""


def fold(state: RankState, event: Event) -> RankState:
    """Folds *event* into *state* and returns it, the same object."""
    if event.t_ns > state.last_event_ns:
        state.last_event_ns = event.t_ns
    if event.t_ns > state.progress_ns and type(event) not in _NO_PROGRESS:
        apart = state.background_unit
        if not apart or getattr(event, "unit", 0) != apart:
            state.progress_ns = event.t_ns
    if not state.first_event_ns:
        state.first_event_ns = event.t_ns
    HANDLERS[type(event)](state, event)
    return state
