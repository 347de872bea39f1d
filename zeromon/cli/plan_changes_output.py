"""Predicted changes of ``zeromon plan``: a table and a chart as text, everything as JSON."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from zeromon.cli.plan_output import interval_text, step_seconds
from zeromon.memory.seconds import StepTime
from zeromon.memory.spec import PLACES
from zeromon.memory.speeds import sources
from zeromon.memory.whatif import Point, difference, front
from zeromon.report.table import Column, column_table, table
from zeromon.tui.draw.chart import Curve, Plot, chart
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds, signed

_WIDTH, _HEIGHT = 76, 14
_MOST_ROWS = 64
_LATE = "(late ranks)"
_BESIDE, _MOST_UNITS = 3, 12
"""So many points have their exposed communication laid side by side, with so many units."""
_MOST_DOTS = 200


def as_text(base: Point, points: Sequence[Point], *, drawn: bool = True) -> str:
    """The table, the chart of memory against time, where speeds come from, and what is unknown.

    *drawn*: with the chart.
    """
    best = front([base, *points])
    setup = base.setup
    assert setup is not None
    shown = points if len(points) <= _MOST_ROWS else [p for p in best if p is not base]
    lines = [f"{setup.model.name}: {setup.plan.label} on {setup.devices} devices", ""]
    lines.append(_table(base, shown, best))
    if len(points) > _MOST_ROWS:
        lines.append(f"  {len(points)} points; the table has those marked *, and --json has all")
    if len(best) > 1 and drawn:
        lines += ["", *_chart(base, points, best)]
    if 0 < len(points) <= _BESIDE:
        lines += ["", *_exposed(base, points)]
    lines += ["", *_notes(base, points)]
    return "\n".join(lines) + "\n"


def _table(base: Point, shown: Sequence[Point], best: Sequence[Point]) -> str:
    def gain(one: Point, *numbers: int) -> str:
        gained = difference(base, one) if one is not base else None
        if one.time is None or gained is None:
            return "n/a" if one.time is None else "-"
        return " to ".join(signed(human_seconds, gained[number]) for number in numbers)

    def exposed(one: Point) -> float | None:
        return one.time.parts.communication + one.time.parts.waiting if one.time else None

    rows = [base, *shown]
    return column_table(
        rows,
        ("change", lambda p: f"{'*' if p in best and len(best) > 1 else ' '} {p.label}"),
        ("step", lambda p: human_seconds(p.time.seconds if p.time else None)),
        ("(from to)", lambda p: interval_text(p.time) if p.time else "n/a"),
        ("difference", lambda p: gain(p, 0)),
        ("(from to)", lambda p: gain(p, 1, 2)),
        ("exposed", lambda p: human_seconds(exposed(p))),
        *(column for column in _WHERE_KNOWN if any(column[1](p) != "n/a" for p in rows)),
    )


_WHERE_KNOWN: tuple[Column[Point], ...] = (
    ("device", lambda p: human_bytes(p.row.device_bytes) + " +" * p.is_bound if p.row else "n/a"),
    ("fits", lambda p: ("yes" if p.row.fits else "no") if p.row and fits_known(p) else "n/a"),
    ("MFU", lambda p: human_ratio(p.mfu if p.row else None)),
    ("tokens/s", lambda p: human_count(p.tokens_per_second if p.row else None)),
)
"""Columns that a table has where a point has a value."""


def _exposed(base: Point, points: Sequence[Point]) -> list[str]:
    """The exposed communication of a step by unit or bucket, the largest first."""
    known = [
        (p.label, {**p.time.exposed, _LATE: p.time.parts.waiting})
        for p in (base, *points)
        if p.time is not None
    ]
    whole: dict[str, float] = defaultdict(float)
    for _, units in known:
        for name, seconds in units.items():
            whole[name] += seconds
    names = sorted(filter(whole.get, whole), key=lambda name: -whole[name])
    if not names:
        return []
    rows = [
        (name, *(human_seconds(units.get(name, 0.0)) for _, units in known))
        for name in names[:_MOST_UNITS]
    ]
    more = len(names) - _MOST_UNITS
    found = [table(("exposed a step", *(label for label, _ in known)), rows)]
    return found + ([f"  and {more} more; --json has all"] if more > 0 else [])


def _chart(base: Point, points: Sequence[Point], best: Sequence[Point]) -> list[str]:
    """Device memory against the time of a sample: the line joins the points marked with ``*``."""
    known = [p for p in (base, *points) if p.row is not None and p.sample_seconds is not None]
    across = [(p.row.device_bytes, p.sample_seconds) for p in known if p.row is not None]
    width, height = max(x for x, _ in across), max(y or 0 for _, y in across)
    line = [(p.row.device_bytes, p.sample_seconds or 0) for p in best if p.row is not None]
    dots = tuple(
        Curve("point", "s1", [(x, y or 0.0)]) for x, y in across[:: len(across) // _MOST_DOTS + 1]
    )
    plot = Plot(
        curves=(Curve("front", "s0", line), *dots),
        x=(0.0, width),
        y=(0.0, height * 1.05),
        axis=lambda value: human_seconds(value).replace(" ", ""),
        ticks=(0.0, height / 2, height),
        foot=("0 B", human_bytes(width)),
    )
    drawn = ["".join(text for text, _ in each) for each in chart(plot, _WIDTH, _HEIGHT)]
    return ["seconds a sample by device memory; the line joins the points marked *:", *drawn]


def _notes(base: Point, points: Sequence[Point]) -> list[str]:
    setup = base.setup
    assert setup is not None
    lines = [f"note: {note}" for note in _assumed(base)]
    if any(point.is_bound for point in (base, *points)):
        lines.append("note: +: at least, as activations or gathered units are unknown")
    if base.time is not None:
        lines += [f"seconds: {text}" for text in sources(setup.machine, setup.measured, setup.plan)]
    unknown = dict.fromkeys((p.error and f"{p.label}: {p.error}") for p in points if p.row is None)
    lines += filter(None, unknown)
    needs = dict.fromkeys(p.unknown for p in (base, *points) if p.row is not None and p.unknown)
    lines += [f"seconds n/a without {what}" for what in needs]
    if setup.measured is not None and any("precision" in p.change for p in points):
        lines.append("note: compute keeps the speed of the run's own precision")
    return lines


def fits_known(one: Point) -> bool:
    """Returns whether the memory of a device is known."""
    return one.setup is not None and one.setup.capacity_known


def _assumed(base: Point) -> list[str]:
    """The assumptions of the setup."""
    assert base.setup is not None
    missing = "what fits is n/a without the memory of a device: give --gpu"
    return [*base.setup.model.notes, *([] if fits_known(base) else [missing])]


def as_json(base: Point, points: Sequence[Point], *, of: int) -> dict[str, Any]:
    """Everything, in bytes and seconds; *of*: how many points were asked for."""
    best = front([base, *points])
    setup = base.setup
    assert setup is not None
    return {
        "model": setup.model.name,
        "devices": setup.devices,
        "usable_bytes": setup.usable_bytes if setup.capacity_known else None,
        "notes": _assumed(base),
        "speeds": sources(setup.machine, setup.measured, setup.plan),
        "asked": of,
        "points": [_one(one, base, best) for one in (base, *points)],
    }


def _one(one: Point, base: Point, best: Sequence[Point]) -> dict[str, Any]:
    found: dict[str, Any] = {"change": dict(one.change), "error": one.error or None}
    row = one.row
    if row is None:
        return found
    found |= {
        "label": row.plan.label,
        "fits": row.fits if fits_known(one) else None,
        "bytes": {place: row.memory.total(place) for place in PLACES},
        "roles": {place: row.memory.by_role(place) for place in PLACES},
        "activations_known": one.counts_activations,
        "bytes_are_least": one.is_bound,
        "communication_bytes": row.communication_bytes,
        "samples": one.samples,
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu,
        "pareto": one in best,
    }
    found |= step_seconds(row)
    if not isinstance(row.time, StepTime):
        return found
    gain = difference(base, one)
    return found | {
        "exposed_seconds": dict(row.time.exposed),
        "difference_seconds": gain[0] if gain else None,
        "difference_seconds_interval": list(gain[1:]) if gain else None,
    }
