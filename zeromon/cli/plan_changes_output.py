"""Predicted changes of ``zeromon plan``: a table and a chart as text, everything as JSON."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from zeromon.base.units import human_bytes, human_count, human_ratio, human_seconds, signed
from zeromon.cli.plan_output import interval_text, step_seconds
from zeromon.memory.seconds import StepTime
from zeromon.memory.spec import PLACES
from zeromon.memory.speeds import speed_sources
from zeromon.memory.whatif import Point, memory_time_front, step_difference
from zeromon.report.table import Column, aligned_table, column_table
from zeromon.tui.draw.chart import Curve, Plot, draw_chart

_WIDTH, _HEIGHT = 76, 14
_MAX_ROWS = 64
_LATE = "(late ranks)"
_MAX_SIDE_BY_SIDE, _MAX_UNITS = 3, 12
"""So many points have their exposed communication laid side by side, with so many units."""
_MAX_DOTS = 200


def changes_as_text(base: Point, points: Sequence[Point], *, drawn: bool = True) -> str:
    """The table, the chart of memory against time, where speeds come from, and what is unknown.

    *drawn*: with the chart.
    """
    pareto = memory_time_front([base, *points])
    setup = base.setup
    assert setup is not None
    listed = points if len(points) <= _MAX_ROWS else [p for p in pareto if p is not base]
    rows = [f"{setup.model.name}: {setup.plan.label} on {setup.devices} devices", ""]
    rows.append(_changes_table(base, listed, pareto))
    if len(points) > _MAX_ROWS:
        rows.append(f"  {len(points)} points; the table has those marked *, and --json has all")
    if len(pareto) > 1 and drawn:
        rows += ["", *_front_chart(base, points, pareto)]
    if 0 < len(points) <= _MAX_SIDE_BY_SIDE:
        rows += ["", *_exposed_tables(base, points)]
    rows += ["", *_point_notes(base, points)]
    return "\n".join(rows) + "\n"


def _changes_table(base: Point, listed: Sequence[Point], pareto: Sequence[Point]) -> str:
    def gain_text(point: Point, *numbers: int) -> str:
        gained = step_difference(base, point) if point is not base else None
        if point.time is None or gained is None:
            return "n/a" if point.time is None else "-"
        return " to ".join(signed(human_seconds, gained[number]) for number in numbers)

    def exposed_seconds(point: Point) -> float | None:
        return point.time.parts.communication + point.time.parts.waiting if point.time else None

    rows = [base, *listed]
    return column_table(
        rows,
        ("change", lambda p: f"{'*' if p in pareto and len(pareto) > 1 else ' '} {p.label}"),
        ("step", lambda p: human_seconds(p.time.seconds if p.time else None)),
        ("(min to max)", lambda p: interval_text(p.time) if p.time else "n/a"),
        ("difference", lambda p: gain_text(p, 0)),
        ("(min to max)", lambda p: gain_text(p, 1, 2)),
        ("exposed", lambda p: human_seconds(exposed_seconds(p))),
        *(column for column in _WHERE_KNOWN if any(column[1](p) != "n/a" for p in rows)),
    )


_WHERE_KNOWN: tuple[Column[Point], ...] = (
    ("device", lambda p: human_bytes(p.row.device_bytes) + " +" * p.is_bound if p.row else "n/a"),
    ("fits", lambda p: ("yes" if p.row.fits else "no") if p.row and fits_known(p) else "n/a"),
    ("MFU", lambda p: human_ratio(p.mfu if p.row else None)),
    ("tokens/s", lambda p: human_count(p.tokens_per_second if p.row else None)),
)
"""Columns that a table has where a point has a value."""


def _exposed_tables(base: Point, points: Sequence[Point]) -> list[str]:
    """The exposed communication of a step by unit or bucket, the largest first."""
    timed = [
        (p.label, {**p.time.exposed, _LATE: p.time.parts.waiting})
        for p in (base, *points)
        if p.time is not None
    ]
    totals: dict[str, float] = defaultdict(float)
    for _, units in timed:
        for name, seconds in units.items():
            totals[name] += seconds
    names = sorted(filter(totals.get, totals), key=lambda name: -totals[name])
    if not names:
        return []
    rows = [
        (name, *(human_seconds(units.get(name, 0.0)) for _, units in timed))
        for name in names[:_MAX_UNITS]
    ]
    omitted = len(names) - _MAX_UNITS
    sections = [aligned_table(("exposed a step", *(label for label, _ in timed)), rows)]
    return sections + ([f"  and {omitted} more; --json has all"] if omitted > 0 else [])


def _front_chart(base: Point, points: Sequence[Point], pareto: Sequence[Point]) -> list[str]:
    """Device memory against the time of a sample: the line joins the points marked with ``*``."""
    placed = [p for p in (base, *points) if p.row is not None and p.sample_seconds is not None]
    across = [(p.row.device_bytes, p.sample_seconds) for p in placed if p.row is not None]
    width, height = max(x for x, _ in across), max(y or 0 for _, y in across)
    curve = [(p.row.device_bytes, p.sample_seconds or 0) for p in pareto if p.row is not None]
    dots = tuple(
        Curve("point", "s1", [(x, y or 0.0)]) for x, y in across[:: len(across) // _MAX_DOTS + 1]
    )
    plot = Plot(
        curves=(Curve("front", "s0", curve), *dots),
        x=(0.0, width),
        y=(0.0, height * 1.05),
        axis=lambda value: human_seconds(value).replace(" ", ""),
        ticks=(0.0, height / 2, height),
        foot=("0 B", human_bytes(width)),
    )
    drawn = ["".join(segment for segment, _ in row) for row in draw_chart(plot, _WIDTH, _HEIGHT)]
    return ["seconds a sample by device memory; the line joins the points marked *:", *drawn]


def _point_notes(base: Point, points: Sequence[Point]) -> list[str]:
    setup = base.setup
    assert setup is not None
    notes = [f"note: {note}" for note in _assumed_notes(base)]
    if any(point.is_bound for point in (base, *points)):
        notes.append("note: +: at least, as activations or gathered units are unknown")
    if base.time is not None:
        notes += [
            f"seconds: {note}" for note in speed_sources(setup.machine, setup.measured, setup.plan)
        ]
    unknown = dict.fromkeys((p.error and f"{p.label}: {p.error}") for p in points if p.row is None)
    notes += filter(None, unknown)
    needs = dict.fromkeys(p.unknown for p in (base, *points) if p.row is not None and p.unknown)
    notes += [f"step time n/a without {quantity}" for quantity in needs]
    if setup.measured is not None and any("precision" in p.change for p in points):
        notes.append("note: compute keeps the speed of the run's own precision")
    return notes


def fits_known(point: Point) -> bool:
    """Returns whether the memory of a device is known."""
    return point.setup is not None and point.setup.capacity_known


def _assumed_notes(base: Point) -> list[str]:
    """The assumptions of the setup."""
    assert base.setup is not None
    missing = "what fits is n/a without the memory of a device: give --gpu"
    return [*base.setup.model.notes, *([] if fits_known(base) else [missing])]


def changes_as_json(base: Point, points: Sequence[Point], *, of: int) -> dict[str, Any]:
    """Everything, in bytes and seconds; *of*: how many points were asked for."""
    pareto = memory_time_front([base, *points])
    setup = base.setup
    assert setup is not None
    return {
        "model": setup.model.name,
        "devices": setup.devices,
        "usable_bytes": setup.usable_bytes if setup.capacity_known else None,
        "notes": _assumed_notes(base),
        "speeds": speed_sources(setup.machine, setup.measured, setup.plan),
        "asked": of,
        "points": [_point_json(point, base, pareto) for point in (base, *points)],
    }


def _point_json(point: Point, base: Point, pareto: Sequence[Point]) -> dict[str, Any]:
    content: dict[str, Any] = {"change": dict(point.change), "error": point.error or None}
    row = point.row
    if row is None:
        return content
    content |= {
        "label": row.plan.label,
        "fits": row.fits if fits_known(point) else None,
        "bytes": {tier: row.memory.total(tier) for tier in PLACES},
        "roles": {tier: row.memory.by_role(tier) for tier in PLACES},
        "activations_known": point.counts_activations,
        "bytes_are_least": point.is_bound,
        "communication_bytes": row.communication_bytes,
        "samples": point.samples,
        "tokens_per_second": point.tokens_per_second,
        "mfu": point.mfu,
        "pareto": point in pareto,
    }
    content |= step_seconds(row)
    if not isinstance(row.time, StepTime):
        return content
    gain = step_difference(base, point)
    return content | {
        "exposed_seconds": dict(row.time.exposed),
        "difference_seconds": gain[0] if gain else None,
        "difference_seconds_interval": list(gain[1:]) if gain else None,
    }
