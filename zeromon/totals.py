"""What of a rank's state only grows: kept beside its ring, so that a new collector counts on.

A ring holds the last records; what was before them is known only to the collector that has read them.
A new one folds what the ring still has, for what is lately, and takes the totals over at the record at
which they were kept. So no counter goes back within a process's life, and none is too low.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from zeromon.events import Op, Path, Phase, Role
from zeromon.state import (
    EngineTotals,
    OpTotals,
    PathTotals,
    RankState,
    UnitTotals,
    operation_totals,
    traffic_row,
)

_PLAIN = (
    "step", "steps", "step_ns", "exposed_ns", "micro_steps", "skipped", "errors", "dropped",
    "first_event_ns", "unsharded_peak",
)  # fmt: skip


class Totals(msgspec.Struct):
    """The totals of a rank, up to its record with the number *records*."""

    records: int
    born_ns: int
    """When its ring was made: another one may have its name."""
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
    traffic: list[tuple[Op, int, Phase, int, int, int, int, float, list[int]]]
    """Its key; then calls, bytes, exposed nanoseconds, best bandwidth, calls by size."""
    first_roles: dict[Role, int]


def totals_of(state: RankState, records: int, born_ns: int = 0) -> Totals:
    """The totals of *state*, which has folded what comes before the record with that number."""
    return Totals(
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
            (*key, row.calls, row.nbytes, row.exposed_ns, row.best_busbw, row.sizes)
            for key, row in state.traffic.items()
        ],
        first_roles=state.first_roles,
    )


def take_over(state: RankState, totals: Totals) -> None:
    """Sets the totals of *state*, which has folded what the ring still has of the same records."""
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
    state.transfers.update(totals.transfers)
    state.sizes.update(totals.sizes)
    state.first_roles.update(totals.first_roles)
    for op, group, known in totals.ops:
        # in place: rows of traffic hold on to it
        _copy(known, operation_totals(state, op, group))
    for op, group, phase, unit, calls, nbytes, exposed_ns, best, sizes in totals.traffic:
        row = traffic_row(state, op, group, phase, unit)
        row.calls, row.nbytes, row.exposed_ns = calls, nbytes, exposed_ns
        row.best_busbw, row.sizes = best, sizes


def _copy(source: OpTotals, target: OpTotals) -> None:
    for field in fields(OpTotals):
        setattr(target, field.name, getattr(source, field.name))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[dict[str, Totals]] = msgspec.msgpack.Decoder(dict[str, Totals])


def encode(totals: dict[str, Totals]) -> bytes:
    """Totals by the name of the ring."""
    return _ENCODER.encode(totals)


def decode(content: bytes) -> dict[str, Totals]:
    """The same; empty for what is broken, or of another version: then only the ring is known."""
    try:
        found = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return {name: totals for name, totals in found.items() if _fits(totals)}


def _fits(totals: Totals) -> bool:
    """Whether its lists are as long as this version's."""
    fresh: Any = RankState()
    return (
        len(totals.step_buckets) == len(fresh.step_bucket_counts)
        and len(totals.phases) == len(fresh.phase_ns)
        and set(totals.plain) == set(_PLAIN)
    )
