"""Folds the records of a ring into the state of a rank, for the live view, replay and report alike.

:func:`fold_records` changes a :class:`~zeromon.fold.state.RankState` in place, because a node folds tens
of thousands of records a second. :func:`~zeromon.fold.summarize.summarize` makes a frozen snapshot of a
state. The fold reads no clock and no file.
"""

from collections.abc import Iterable

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
from zeromon.fold.ledger import end_silence
from zeromon.fold.state import HANDLERS, MOST_ARRIVALS, Call, RankState
from zeromon.ring.events import Event, Raw, decode, is_progress


def fold_records(state: RankState, records: Iterable[Raw]) -> None:
    """Folds *records* in their order; counts as dropped those that this version does not know.

    Nine of ten are of collectives, which are folded without being decoded.
    """
    calls, apart = state.calls, state.background_unit or -1
    for record in records:
        call = calls.get(record[2]) or _new_call(state, record)
        if call is None:
            continue
        t_ns = record[1]
        if t_ns > state.last_event_ns:
            state.last_event_ns = t_ns
        if t_ns > state.progress_ns and call.unit != apart:
            if state.silence is not None:
                end_silence(state, t_ns)
            state.progress_ns = t_ns
        if not state.first_event_ns:
            state.first_event_ns = t_ns
        collectives.fold_call(state, call, record)
    if len(state.arrivals) > MOST_ARRIVALS:
        del state.arrivals[:-MOST_ARRIVALS]


def _new_call(state: RankState, record: Raw) -> Call | None:
    """Returns what a collective's records like *record* have in common; folds one of another kind."""
    if collectives.is_call(record):
        call = collectives.call_of(state, record[2])
        state.dropped += call is None
        return call
    event = decode(record)
    if event is None:
        state.dropped += 1
    else:
        fold(state, event)
    return None


def fold(state: RankState, event: Event) -> RankState:
    """Folds *event* into *state* and returns it, the same object."""
    if event.t_ns > state.last_event_ns:
        state.last_event_ns = event.t_ns
    if event.t_ns > state.progress_ns and is_progress(event, state.background_unit):
        if state.silence is not None:
            end_silence(state, event.t_ns)
        state.progress_ns = event.t_ns
    if not state.first_event_ns:
        state.first_event_ns = event.t_ns
    HANDLERS[type(event)](state, event)
    return state
