"""Saves the totals of a rank beside its ring, so that a restarted collector continues to count.

A ring holds the last records only, so a new collector cannot count the earlier ones. It folds the
records that the ring still holds, which gives the recent figures, and replaces the totals by the saved
ones at the record at which they were saved. Thus no counter decreases while a process runs, and
none is too low.
"""

from dataclasses import fields
from typing import Any

import msgspec

from zeromon.fold.communication import OpTotals
from zeromon.fold.saved_totals import EngineTotals, PathTotals
from zeromon.fold.state import (
    ActivityTotals,
    BatchTotals,
    LedgerSums,
    RankState,
    ScalarTotals,
    Silence,
    UnitTotals,
    stats_row,
)
from zeromon.ring.events import Activity, Op, Path, Phase, Role, Scalar

_PLAIN = (
    "step", "steps", "step_ns", "exposed_ns", "micro_steps", "skipped", "errors", "dropped",
    "first_event_ns", "unsharded_peak", "startup_ns", "in_cpp",
)  # fmt: skip


class Checkpoint(msgspec.Struct):
    """The totals of a rank, up to its record with the number *records*."""

    records: int
    born_ns: int
    """Creation time of the ring, because a later ring may have the same name."""
    plain: dict[str, int]
    step_buckets: list[int]
    phases: list[int]
    untimed: dict[int, int]
    unattributed: dict[int, int]
    gathers: list[tuple[bool, list[int]]]
    ops: list[tuple[Op, int, OpTotals]]
    units: dict[int, UnitTotals]
    engines: dict[int, EngineTotals]
    transfers: dict[Path, PathTotals]
    sizes: dict[Op, list[int]]
    traffic: list[tuple[Op, int, Phase, int, int, int, int, float, list[int], dict[int, int], int]]
    """The key of a row; then calls, bytes, exposed nanoseconds, best bandwidth, calls by size, waits."""
    ledger: LedgerSums
    silence: Silence | None
    scalars: dict[Scalar, ScalarTotals]
    batches: BatchTotals
    setup_ns: list[int]
    activities: list[tuple[Phase, Activity, bool, ActivityTotals]]
    first_roles: dict[Role, int]


def checkpoint_of(state: RankState, records: int, born_ns: int = 0) -> Checkpoint:
    """Returns the totals of *state*, which has folded the records before number *records*."""
    return Checkpoint(
        records=records,
        born_ns=born_ns,
        plain={name: getattr(state, name) for name in _PLAIN},
        step_buckets=state.step_bucket_counts,
        phases=state.phase_ns,
        untimed=state.untimed,
        unattributed=state.unattributed,
        gathers=list(state.gathers.items()),
        ops=[(op, group, totals) for (op, group), totals in state.ops.items()],
        units=state.unit_totals,
        engines=state.engines,
        transfers=state.transfers,
        sizes=state.sizes,
        traffic=[
            (
                *key,
                row.calls,
                row.nbytes,
                row.exposed_ns,
                row.best_busbw,
                row.sizes,
                row.waits,
                row.matched_ns,
            )
            for key, row in state.traffic.items()
        ],
        ledger=state.ledger,
        silence=state.silence,
        scalars=state.scalars,
        batches=state.batches,
        setup_ns=state.setup_ns,
        activities=[(*key, totals) for key, totals in state.activities.items()],
        first_roles=state.first_roles,
    )


def restore(state: RankState, totals: Checkpoint) -> None:
    """Sets the totals of *state*, which has folded those records that the ring still holds."""
    for name, value in totals.plain.items():
        if name in _PLAIN:
            setattr(state, name, value)
    state.step_bucket_counts[:] = totals.step_buckets
    state.phase_ns[:] = totals.phases
    state.untimed.update(totals.untimed)
    state.unattributed.update(totals.unattributed)
    state.gathers.update(totals.gathers)
    state.unit_totals.update(totals.units)
    state.engines.update(totals.engines)
    state.scalars.update(totals.scalars)
    state.transfers.update(totals.transfers)
    state.sizes.update(totals.sizes)
    state.first_roles.update(totals.first_roles)
    for op, group, known in totals.ops:
        # in place: rows of traffic refer to the object
        _copy(known, state.ops[op, group])
    state.ledger, state.setup_ns[:] = totals.ledger, totals.setup_ns
    state.silence = totals.silence
    state.batches = totals.batches
    for of, activity, background, sums in totals.activities:
        state.activities[of, activity, background] = sums
    for (
        op,
        group,
        phase,
        unit,
        calls,
        nbytes,
        exposed_ns,
        best,
        sizes,
        waits,
        matched,
    ) in totals.traffic:
        row = stats_row(state, op, group, phase, unit)
        row.waits, row.matched_ns = waits, matched
        row.calls, row.nbytes, row.exposed_ns = calls, nbytes, exposed_ns
        row.best_busbw, row.sizes = best, sizes


def _copy(source: OpTotals, target: OpTotals) -> None:
    for field in fields(OpTotals):
        setattr(target, field.name, getattr(source, field.name))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[dict[str, Checkpoint]] = msgspec.msgpack.Decoder(
    dict[str, Checkpoint]
)


def encode(totals: dict[str, Checkpoint]) -> bytes:
    """Encodes the totals by name of the ring."""
    return _ENCODER.encode(totals)


def decode(content: bytes) -> dict[str, Checkpoint]:
    """Decodes what :func:`encode` wrote; leaves out totals that are broken or of another version."""
    try:
        totals_by_ring = _DECODER.decode(content)
    except (ValueError, RecursionError):
        return {}
    return {name: totals for name, totals in totals_by_ring.items() if _fits(totals)}


def _fits(totals: Checkpoint) -> bool:
    """Whether the lists and names of *totals* are those of this version."""
    fresh: Any = RankState()
    return (
        len(totals.step_buckets) == len(fresh.step_bucket_counts)
        and len(totals.phases) == len(totals.setup_ns) == len(fresh.phase_ns)
        and set(totals.plain) == set(_PLAIN)
    )
