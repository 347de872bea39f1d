"""What monitors show beside independent counts, and the largest error of each figure.

Knows no monitor. A monitor gives :class:`Readings` of a case; a further one is a further entry of the
mapping that :func:`rows` gets, and so a further column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Values = Mapping[int, Sequence[float | None]]
"""Rank -> the values of a figure: one, or one a step. None: the figure is not known."""
Readings = Mapping[str, Values]
"""Figure -> its values."""

LEAST_OF_STEP = 0.01
"""A time below this share of a step is compared with this share of the step, not with itself."""


class Truth(NamedTuple):
    """The independent count of one figure."""

    values: Values
    unit: str
    """s, ratio, bytes, or "" for a count."""
    source: str
    """What counted it."""


class Case(NamedTuple):
    """One run with its independent counts."""

    name: str
    step_seconds: float
    truths: Mapping[str, Truth]
    """By name of the figure; a second count of it has a word after a comma."""


class Row(NamedTuple):
    """One figure of one case."""

    case: str
    figure: str
    truth: str
    source: str
    shown: dict[str, str]
    """Monitor -> its values, as text."""
    errors: dict[str, float | None]
    """Monitor -> largest error; None where it shows nothing that is known. Infinite: a made-up value."""


def rows(case: Case, monitors: Mapping[str, Readings]) -> list[Row]:
    """A row for each figure that was counted."""
    counts = [(name.partition(",")[0], truth) for name, truth in case.truths.items()]
    return [
        Row(
            case=case.name,
            figure=figure,
            truth=_text(truth, truth.values),
            source=truth.source,
            shown={name: _text(truth, read.get(figure, {})) for name, read in monitors.items()},
            errors={name: error(case, truth, read.get(figure, {})) for name, read in monitors.items()},
        )
        for figure, truth in counts
    ]  # fmt: skip


def error(case: Case, truth: Truth, shown: Values) -> float | None:
    """The largest error over ranks and steps: of a ratio its difference, else a share of the truth."""
    known = [
        _error(case, truth.unit, counted, value)
        for rank, counts in truth.values.items()
        for counted, value in zip(counts, shown.get(rank, [None] * len(counts)), strict=True)
        if counted is None or value is not None
    ]
    return max(known, default=None)


def _error(case: Case, unit: str, counted: float | None, value: float | None) -> float:
    if counted is None:  # there is nothing to know
        return 0.0 if value is None else float("inf")
    assert value is not None
    if unit == "ratio":
        return abs(value - counted)
    least = LEAST_OF_STEP * case.step_seconds if unit == "s" else 1.0
    return abs(value - counted) / max(abs(counted), least)


def _text(truth: Truth, values: Values) -> str:
    """The values by rank; of steps their mean."""
    return " / ".join(_value(values.get(rank, ()), truth.unit) for rank in sorted(truth.values))


def _value(values: Sequence[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "n/a"
    mean = sum(known) / len(known)
    if unit == "s":
        return f"{mean * 1e3:.3f} ms"
    if unit == "ratio":
        return f"{mean * 100:.2f} %"
    return f"{mean / (1 << 20):.1f} MiB" if unit == "bytes" else f"{mean:g}"


def worst(found: Iterable[Row], monitor: str) -> dict[str, Row]:
    """Figure -> the row with the largest error of *monitor*."""
    largest: dict[str, Row] = {}
    for row in found:
        before = largest.get(row.figure)
        if before is None or (row.errors[monitor] or 0.0) > (before.errors[monitor] or 0.0):
            largest[row.figure] = row
    return largest


def percent(share: float | None) -> str:
    """An error for people."""
    if share is None:
        return "not shown"
    return "made up" if share == float("inf") else f"{share * 100:.3f} %"


def table(found: Sequence[Row], monitors: Sequence[str]) -> str:
    """All rows, aligned."""
    heads = ["case", "figure", "counted by", "counted"]
    lines = [heads + [part for name in monitors for part in (name, "error")]]
    for row in found:
        cells = [part for name in monitors for part in (row.shown[name], percent(row.errors[name]))]
        lines.append([row.case, row.figure, row.source, row.truth, *cells])
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
