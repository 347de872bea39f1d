"""Saves the totals of a rank beside its ring, so that a restarted collector continues to count.

A ring holds the last records only, so a new collector cannot count the earlier ones. It folds the
records that the ring still holds, which gives the recent figures, and replaces the totals by the saved
ones at the record at which they were saved. Thus no counter decreases while a process runs, and
none is too low.
"""

from dataclasses import dataclass, fields
from typing import Annotated

import msgspec

from zeromon.fold.collective_stats import Key, OpTotals
from zeromon.fold.saved_totals import EngineTotals, PathTotals
from zeromon.fold.state import (
    STEP_BUCKETS,
    ActivityTotals,
    BatchTotals,
    LedgerSums,
    RankState,
    ScalarTotals,
    Silence,
    UnitTotals,
)
from zeromon.ring.codes import Activity, Op, Path, Phase, Role, Scalar

# The lengths refuse totals of a version with other buckets or phases, whose counts would shift
_Buckets = Annotated[
    list[int], msgspec.Meta(min_length=len(STEP_BUCKETS) + 1, max_length=len(STEP_BUCKETS) + 1)
]
_ByPhase = Annotated[list[int], msgspec.Meta(min_length=len(Phase), max_length=len(Phase))]


@dataclass(slots=True)
class RowTotals:
    """The totals of a row of communication, by the names of its attributes."""

    calls: int
    nbytes: int
    exposed_ns: int
    best_busbw: float
    sizes: list[int]
    waits: dict[int, int]
    matched_ns: int


class Checkpoint(msgspec.Struct):
    """The totals of a rank, up to its record with the number *records*; most as the state has them."""

    records: int
    born_ns: int
    """Creation time of the ring, because a later ring may have the same name."""
    step: int
    steps: int
    step_ns: int
    exposed_ns: int
    micro_steps: int
    skipped: int
    errors: int
    dropped: int
    first_event_ns: int
    unsharded_peak: int
    startup_ns: int
    in_cpp: int
    step_bucket_counts: _Buckets
    phase_ns: _ByPhase
    setup_ns: _ByPhase
    untimed: dict[int, int]
    unattributed: dict[int, int]
    gathers: dict[bool, list[int]]
    ops: dict[tuple[Op, int], OpTotals]
    unit_totals: dict[int, UnitTotals]
    engines: dict[int, EngineTotals]
    transfers: dict[Path, PathTotals]
    sizes: dict[Op, list[int]]
    traffic: dict[Key, RowTotals]
    ledger: LedgerSums
    silence: Silence | None
    scalars: dict[Scalar, ScalarTotals]
    batches: BatchTotals
    activities: dict[tuple[Phase, Activity, bool], ActivityTotals]
    first_roles: dict[Role, int]


_ROW_FIELDS = tuple(field.name for field in fields(RowTotals))
_COPIED_FIELDS = tuple(
    name for name in Checkpoint.__struct_fields__ if name not in ("records", "born_ns", "ops", "traffic")
)


def checkpoint_of_state(state: RankState, records: int, born_ns: int = 0) -> Checkpoint:
    """Returns the totals of *state*, which has folded the records before number *records*."""
    return Checkpoint(
        records=records,
        born_ns=born_ns,
        ops=state.ops,
        traffic={
            key: RowTotals(**{name: getattr(row, name) for name in _ROW_FIELDS})
            for key, row in state.traffic.items()
        },
        **{name: getattr(state, name) for name in _COPIED_FIELDS},
    )


def restore_totals(state: RankState, totals: Checkpoint) -> None:
    """Sets the totals of *state*, which has folded those records that the ring still holds."""
    for name in _COPIED_FIELDS:
        present, saved = getattr(state, name), getattr(totals, name)
        # Updated in place: the state's defaultdicts would become the plain dicts that msgspec decodes
        if isinstance(present, dict):
            present.update(saved)
        else:
            setattr(state, name, saved)
    for of_op, op_totals in totals.ops.items():
        # in place: rows of traffic refer to the object
        for field in fields(OpTotals):
            setattr(state.ops[of_op], field.name, getattr(op_totals, field.name))
    for key, known_row in totals.traffic.items():
        row = state.stats_row(*key)
        for name in _ROW_FIELDS:
            setattr(row, name, getattr(known_row, name))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[dict[str, Checkpoint]] = msgspec.msgpack.Decoder(dict[str, Checkpoint])


def encode_checkpoints(totals: dict[str, Checkpoint]) -> bytes:
    """Encodes the totals by name of the ring."""
    return _ENCODER.encode(totals)


def decode_checkpoints(content: bytes) -> dict[str, Checkpoint]:
    """Decodes what :func:`encode_checkpoints` wrote; {} for what is broken or of another version."""
    try:
        return _DECODER.decode(content)
    except (ValueError, RecursionError):
        return {}
