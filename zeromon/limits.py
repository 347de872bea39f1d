"""Limits on the differences of runs, for CI: ``peak_memory>+5%``, ``exposed_share>+5pp``. Pure.

A limit is broken when the figure is beyond it by more than the noise. The same runs give the same
answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zeromon.compare import Column, Comparison, Row, letter, said
from zeromon.errors import CompareError
from zeromon.measures import METRIC, METRICS, PEAK_MEMORY

_LIMIT = re.compile(r"\s*([a-z_.]+)\s*([<>])\s*([+-]?)\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_BYTES = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_UNITS = {"s": _SECONDS, "bytes": _BYTES, "1/s": {"": 1.0}, "count": {"": 1.0}}

NAMES = (PEAK_MEMORY, *(metric.name for metric in METRICS if "." not in metric.name))
"""What a limit can be set on, besides ``PLACE.ROLE``."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure, or its difference to the first run's, must not pass."""

    text: str
    metric: str
    above: bool
    """It must not come above *amount*; else not below."""
    relative: bool
    """Of the difference, else of the figure itself."""
    share: bool
    """*amount* is a share of the first run's figure."""
    amount: float
    """In the metric's unit, or a share."""


def parse(text: str) -> Limit:
    """The limit that *text* says; raises :class:`CompareError` with what is allowed."""
    found = _LIMIT.fullmatch(text)
    if found is None:
        raise CompareError(
            f"{text!r} is no limit",
            "Like peak_memory>+5%, step_time>+10ms, exposed_share>+5pp or peak_rss>60GiB.",
        )
    metric, sign, direction, number, unit = found.groups()
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
            f"{text!r}: no limit of {metric} is {given}", f"Its {what} are in: {units}."
        )
    return Limit(text.strip(), metric, sign == ">", bool(direction), share, amount * allowed[unit])


def broken(comparison: Comparison, limits: Iterable[Limit]) -> Iterator[str]:
    """A sentence for each limit that a run after the first breaks, and for each that died.

    Raises :class:`CompareError` where a figure is not known: what cannot be judged does not pass.
    """
    for number, column in enumerate(comparison.columns[1:], 1):
        if column.died:
            yield f"{_name(number, column)} {column.ended}"
    for limit in limits:
        row = comparison.row(limit.metric)
        for number, column in enumerate(comparison.columns[1:], 1):
            if not column.died and _is_broken(limit, row, number, _name(number, column)):
                yield f"{limit.text}: {_name(number, column)} has {said(row, number)}"


def _name(number: int, column: Column) -> str:
    return f"{letter(number)} ({column.runs[0]})"


def _is_broken(limit: Limit, row: Row, number: int, name: str) -> bool:
    first, cell = row.cells[0], row.cells[number]
    for one, whose in ((first, "the first run"), (cell, name)):
        if one.value is None and (limit.relative or one is cell):
            raise CompareError(f"{limit.text} cannot be judged: of {whose}, {one.why}")
    figure, noise = (
        (cell.difference, cell.noise) if limit.relative else (cell.value, cell.half_width)
    )
    if figure is None or noise is None:
        hint = "About 50 steps are needed to tell what is noise."
        raise CompareError(f"{limit.text} cannot be judged: {name} has too few steps", hint)
    amount = limit.amount * abs(first.value or 0.0) if limit.share else limit.amount
    return figure - noise > amount if limit.above else figure + noise < amount
