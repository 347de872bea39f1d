"""Thresholds on the differences of runs, for CI: ``peak_memory>+5%``, ``exposed_share>+5pp``. Pure.

A run exceeds a threshold when the figure is beyond the bound by more than the noise. The result is
deterministic: the same runs exceed the same thresholds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zeromon.compare.comparison import Column, Comparison, Row, format_cell, letter
from zeromon.compare.figures import METRIC, METRICS, PEAK_MEMORY
from zeromon.errors import CompareError

_LIMIT = re.compile(r"\s*([a-z_.]+)\s*([<>])\s*([+-]?)\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_BYTES = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_UNITS = {"s": _SECONDS, "bytes": _BYTES, "1/s": {"": 1.0}, "count": {"": 1.0}}

NAMES = (PEAK_MEMORY, *(metric.name for metric in METRICS if "." not in metric.name))
"""Names of figures for thresholds, in addition to ``PLACE.ROLE``."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A bound on a figure, or on its difference to the figure of the first run."""

    text: str
    metric: str
    above: bool
    """An upper bound; else a lower bound."""
    relative: bool
    """A bound on the difference, else on the figure itself."""
    share: bool
    """Whether *amount* is a share of the figure of the first run."""
    amount: float
    """The bound in the metric's unit, or as a share."""


def parse(text: str) -> Threshold:
    """Returns the threshold in *text*; raises :class:`CompareError` with the allowed forms."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise CompareError(
            f"{text!r} is not a threshold",
            "Like peak_memory>+5%, step_time>+10ms, exposed_share>+5pp or peak_rss>60GiB.",
        )
    metric, sign, direction, number, unit = match.groups()
    if metric not in METRIC and metric != PEAK_MEMORY:
        hint = f"Known are {', '.join(NAMES)}, and PLACE.ROLE like device.optimizer_state."
        raise CompareError(f"there is no figure {metric!r}", hint)
    kind = "bytes" if metric == PEAK_MEMORY else METRIC[metric].unit
    amount = float(f"{direction}{number}")
    share = False
    if kind == "ratio":
        allowed = {"pp": 0.01} if direction else {"%": 0.01}
    else:
        allowed = dict(_UNITS[kind])
        share = bool(direction) and unit == "%"
        allowed |= {"%": 0.01} if direction else {}
    if unit not in allowed:
        given = f"in {unit}" if unit else "without a unit"
        units = ", ".join(name or "no unit" for name in allowed)
        what = "differences" if direction else "limits"
        raise CompareError(
            f"{text!r}: no threshold of {metric} is {given}", f"Its {what} are in: {units}."
        )
    return Threshold(
        text.strip(), metric, sign == ">", bool(direction), share, amount * allowed[unit]
    )


def exceeded(comparison: Comparison, limits: Iterable[Threshold]) -> Iterator[str]:
    """Yields a sentence for each threshold that a run after the first exceeds, and for each dead run.

    Raises :class:`CompareError` for an unknown figure: a threshold that cannot be checked must not pass.
    """
    for number, column in enumerate(comparison.columns[1:], 1):
        if column.died:
            yield f"{_name(number, column)} {column.ended}"
    for limit in limits:
        row = comparison.row(limit.metric)
        for number, column in enumerate(comparison.columns[1:], 1):
            if not column.died and _is_exceeded(limit, row, number, _name(number, column)):
                yield f"{limit.text}: {_name(number, column)} has {format_cell(row, number)}"


def _name(number: int, column: Column) -> str:
    return f"{letter(number)} ({column.runs[0]})"


def _is_exceeded(limit: Threshold, row: Row, number: int, name: str) -> bool:
    first, cell = row.cells[0], row.cells[number]
    for one, whose in ((first, "the first run"), (cell, name)):
        if one.value is None and (limit.relative or one is cell):
            raise CompareError(f"{limit.text} cannot be judged for {whose}: {one.why}")
    figure, noise = (
        (cell.difference, cell.noise) if limit.relative else (cell.value, cell.half_width)
    )
    if figure is None or noise is None:
        hint = "About 50 steps are needed to estimate the noise."
        raise CompareError(f"{limit.text} cannot be judged: {name} has too few steps", hint)
    amount = limit.amount * abs(first.value or 0.0) if limit.share else limit.amount
    return figure - noise > amount if limit.above else figure + noise < amount
