"""Records: every kind is declared, and what earlier versions wrote decodes to the same events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import get_type_hints

import pytest

from zeromon.fold.checkpoint import checkpoint_of_state, encode_checkpoints
from zeromon.fold.fold import fold_event, fold_records
from zeromon.fold.state import HANDLERS, RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.ring import events
from zeromon.ring.buffer import NameKind, RingReader
from zeromon.ring.codes import Kind
from zeromon.ring.events import Raw, decode_record

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def recorded(tmp_path: Path) -> RingReader:
    """A ring that the first version of the format wrote: six records of each of its 20 kinds."""
    path = tmp_path / "rank3.ring"
    path.write_bytes(gzip.decompress((DATA / "every_kind.ring.gz").read_bytes()))
    return RingReader(path)


def test_every_kind_has_a_record_with_one_expression_a_field() -> None:
    assert set(events._LAYOUTS) == {int(kind) for kind in Kind}
    for event, layout in events._LAYOUTS.values():
        assert len(layout.split(",")) == len(event._fields), event  # type: ignore[attr-defined]


def test_a_recorded_ring_decodes_as_its_own_version_did(recorded: RingReader) -> None:
    """The expected events were decoded by the version that wrote the ring."""
    expected = json.loads((DATA / "every_kind.json").read_text())
    found = [decode_record(raw) for raw in recorded.read(final=True)]
    for e, row in zip(found, expected, strict=True):  # a later version may append fields
        assert row == (None if e is None else [type(e).__name__, *e][: len(row or [])])
    for event in filter(None, found):
        hints = get_type_hints(type(event))
        wrong = [n for n, hint in hints.items() if not isinstance(getattr(event, n), hint)]
        assert wrong == [], event
    kinds = {name for row in expected if row for name in row[:1]}
    assert len(kinds) == 20
    assert expected.count(None) == 4  # a kind, an operation, a phase and an ending of the future


def test_a_recorded_ring_folds(recorded: RingReader) -> None:
    state = RankState(rank=recorded.header.rank)
    for name in recorded.names():
        if name.kind == NameKind.GROUP:
            state.groups[name.id] = name.payload
    for raw in recorded.read(final=True):
        event = decode_record(raw)
        if event is not None:
            fold_event(state, event)
    rank = summarize_rank(state)
    assert (rank.rank, rank.steps.watched_steps > 0, len(rank.steps.recent) > 0) == (3, True, True)
    assert sum(row.count for row in rank.communication.collectives) > 0


@pytest.mark.parametrize("name", ["exposed-fsdp2-on", "exposed-zero2", "healthy-ddp"])
def test_records_fold_as_their_events_do(name: str, tmp_path: Path) -> None:
    """Collectives are folded without being decoded, and what comes out is the same to the bit."""
    path = tmp_path / "rank0.ring"
    path.write_bytes(gzip.decompress((DATA / "rings" / name / "rank0.ring.gz").read_bytes()))
    records = RingReader(path).read(final=True)
    by_event, by_record = RankState(), RankState()
    for event in filter(None, map(decode_record, records)):
        fold_event(by_event, event)
    fold_records(by_record, records)
    assert summarize_rank(by_record).communication.collectives
    assert summarize_rank(by_record) == summarize_rank(by_event)
    assert encode_checkpoints({"": checkpoint_of_state(by_record, 1)}) == encode_checkpoints(
        {"": checkpoint_of_state(by_event, 1)}
    )


def test_an_unknown_kind_is_no_event() -> None:
    raw: Raw = (1, 2, 250, 1, 2, 3, 4, 1)
    assert decode_record(raw) is None


def test_every_event_is_folded() -> None:
    assert set(HANDLERS) == {event for event, _ in events._LAYOUTS.values()}
