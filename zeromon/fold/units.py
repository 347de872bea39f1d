"""Folds the marks of FSDP units and ZeRO-3 parameters: gathered, used, freed."""

from zeromon.fold.state import RankState, folds
from zeromon.ring.events import Flag, UnitEvent, UnitMark
from zeromon.snapshot import UnitRow

_AHEAD = int(Flag.AHEAD)


@folds(UnitMark)
def _fold_unit(state: RankState, e: UnitMark) -> None:
    unit = state.unit_totals[e.unit]
    state.phase = e.phase
    if e.event is UnitEvent.UNSHARD:
        unit.unshards += 1
        state.unit = e.unit
        _unshard(state, e)
        if e.nbytes:
            state.gathers.setdefault(bool(e.flags & _AHEAD), [0, 0])[0] += e.nbytes
    elif e.event is UnitEvent.RESHARD:
        state.unsharded_now -= state.unsharded.pop(e.unit, 0)
    if e.allocated_bytes >= 0:
        unit.peak_allocated_bytes = max(unit.peak_allocated_bytes, e.allocated_bytes)
        state.window.allocated = max(state.window.allocated, e.allocated_bytes)


def _unshard(state: RankState, e: UnitMark) -> None:
    """Counts a unit as gathered. ZeRO-3 gathers parameters one by one and reports their sum itself."""
    if e.gathered_bytes:
        state.unsharded_now = e.gathered_bytes
    else:
        nbytes = state.unit_bytes.get(e.unit, 0)
        state.unsharded_now += nbytes - state.unsharded.get(e.unit, 0)
        state.unsharded[e.unit] = nbytes
    if state.unsharded_now:
        state.unsharded_peak = max(state.unsharded_peak, state.unsharded_now)


def reshard_all(state: RankState) -> None:
    """Counts all units as freed: after backward they are, and some backends send no mark for each."""
    state.unsharded.clear()
    state.unsharded_now = 0


def unit_rows(state: RankState) -> tuple[UnitRow, ...]:
    """The units, the most exposed first."""
    ordered = sorted(state.unit_totals.items(), key=lambda item: -item[1].exposed_ns)
    return tuple(
        UnitRow(
            fqn=state.units.get(number, f"unit {number}"),
            unshards=totals.unshards,
            exposed_seconds=totals.exposed_ns / 1e9,
            peak_allocated_bytes=totals.peak_allocated_bytes,
        )
        for number, totals in ordered[:256]
        if number
    )
