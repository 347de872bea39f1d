"""Which events are progress of training; the agent of a rank that stands still writes, too."""

from __future__ import annotations

import pytest
from builders import state

from zeromon.fold.fold import fold_event, fold_records
from zeromon.ring.codes import Flag, Kind, Phase
from zeromon.ring.events import Event, PhaseSpan, Raw, decode_record, pack_head

OF_TRAINING = {
    Kind.ISSUED, Kind.DONE, Kind.COUNTED, Kind.PHASE, Kind.STEP, Kind.START, Kind.UNIT, Kind.STALL,
    Kind.BACKWARD_COMM, Kind.BUCKET, Kind.PRECISION, Kind.TRANSFER, Kind.STAGE, Kind.BATCH,
}  # fmt: skip
"""Caused by the loop alone."""
OF_THE_AGENT = {
    Kind.MEMORY, Kind.MEMORY_PEAK, Kind.HOST, Kind.GROUP_SEQUENCE, Kind.BEAT, Kind.OOM, Kind.EXIT,
    Kind.TRACE, Kind.TRIAL, Kind.ROLE, Kind.SCALAR, Kind.LOADING, Kind.LOADING_READ, Kind.ALLOCATED_PEAK,
}  # fmt: skip
"""Written by the heartbeat, by a logger's thread, or at the end as well."""


def record(kind: Kind, t_ns: int) -> Raw:
    """A record of *kind* whose codes exist in every kind."""
    return (1, t_ns, pack_head(kind, 1, Phase.FORWARD), 0, 0, 0, 0, 1)


def decoded(kind: Kind) -> Event:
    event = decode_record(record(kind, 7))
    assert event is not None
    return event


def test_every_kind_is_classified() -> None:
    assert set(Kind) == OF_TRAINING | OF_THE_AGENT
    assert not OF_TRAINING & OF_THE_AGENT


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_only_what_training_causes_is_progress(kind: Kind) -> None:
    expected = 7 if kind in OF_TRAINING else 0
    by_record, by_event = state(), state()
    fold_records(by_record, [record(kind, 7)])
    fold_event(by_event, decoded(kind))
    assert (by_record.dropped, by_record.last_event_ns) == (0, 7)
    assert by_record.progress_ns == by_event.progress_ns == expected


@pytest.mark.parametrize(
    "span",
    [PhaseSpan(7, Phase.CHECKPOINT, Flag.ASYNC, 3), PhaseSpan(7, Phase.GARBAGE_COLLECTION, 0, 3)],
    ids=["another thread", "garbage collection"],
)
def test_a_phase_that_may_pass_in_a_stall_is_no_progress(span: PhaseSpan) -> None:
    assert fold_event(state(), span).progress_ns == 0
