"""Thresholds on the differences of runs, for CI: ``peak_memory>+5%``, ``exposed_share>+5pp``. Pure.

A run exceeds a threshold when the figure is beyond the bound by more than the noise and by more than the
machine may have added. It passes when the figure is not, and the noise is small enough to find a figure
twice beyond the bound; else the threshold is undecided, and does not pass. The same runs always get the
same answer.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeromon.base.errors import CompareError
from zeromon.base.units import human_ratio
from zeromon.comparison.comparison import (
    METRIC,
    METRICS,
    PEAK_MEMORY,
    Cell,
    Column,
    Comparison,
    Row,
    letter,
)
from zeromon.comparison.environment import REPEATS
from zeromon.comparison.text import format_cell
from zeromon.snapshot.noise import Estimate, half_width

_LIMIT = re.compile(r"\s*([a-z_.]+)\s*([<>])\s*([+-]?)\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_BYTES = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_UNITS = {"s": _SECONDS, "bytes": _BYTES, "1/s": {"": 1.0}, "count": {"": 1.0}, "ratio": {}}

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
    """True if *amount* is a share of the figure of the first run."""
    amount: float
    """The bound in the metric's unit, or as a share."""


def parse_limit(expression: str) -> Threshold:
    """Returns the threshold in *expression*; raises :class:`CompareError` with the allowed forms."""
    match = _LIMIT.fullmatch(expression)
    if match is None:
        raise CompareError(
            f"{expression!r} is not a threshold",
            "Like peak_memory>+5%, step_time>+10ms, exposed_share>+5pp or peak_rss>60GiB.",
        )
    metric, sign, direction, number, unit = match.groups()
    if metric not in METRIC and metric != PEAK_MEMORY:
        hint = f"Known are {', '.join(NAMES)}, and PLACE.ROLE like device.optimizer_state."
        raise CompareError(f"there is no figure {metric!r}", hint)
    kind = "bytes" if metric == PEAK_MEMORY else METRIC[metric].unit
    amount = float(f"{direction}{number}")
    share = bool(direction) and unit == "%"
    allowed = _UNITS[kind] | ({"%": 0.01} if direction else {})
    if kind == "ratio":
        # "+5%" of a share has two meanings: differences are in points, limits in percent
        allowed = {"pp": 0.01} if direction else {"%": 0.01}
    if unit not in allowed:
        form = f"in {unit}" if unit else "without a unit"
        units = ", ".join(name or "no unit" for name in allowed)
        bounds = "differences" if direction else "limits"
        raise CompareError(
            f"{expression!r}: no threshold of {metric} is {form}", f"Its {bounds} are in: {units}."
        )
    return Threshold(
        expression.strip(), metric, sign == ">", bool(direction), share, amount * allowed[unit]
    )


class Verdict(NamedTuple):
    """The verdict of thresholds on a comparison: a sentence for each that does not hold."""

    exceeded: tuple[str, ...]
    undecided: tuple[str, ...]
    """Thresholds that cannot be judged, which therefore do not pass."""


def judge_limits(comparison: Comparison, limits: Iterable[Threshold]) -> Verdict:
    """Returns which limits the later runs exceed, as all that died do, and which cannot be judged."""
    candidates = list(enumerate(comparison.columns[1:], 1))
    exceeded = [f"{_run_name(n, column)} {column.ended}" for n, column in candidates if column.died]
    undecided = []
    for limit in limits:
        row = comparison.row(limit.metric)
        for number, column in candidates:
            if not column.died:
                case = _Case(limit, row, comparison.columns, number)
                if reason := case.unknown():
                    undecided.append(reason)
                elif case.is_exceeded():
                    exceeded.append(f"{limit.text}: {case.name} has {format_cell(row, number)}")
                elif case.is_undecided():
                    undecided.append(case.needs())
    return Verdict(tuple(exceeded), tuple(undecided))


def _run_name(number: int, column: Column) -> str:
    return f"{letter(number)} ({column.runs[0]})"


_MAX_REPEATS = 30
_FEW_STEPS = "about 50 steps are needed to estimate the noise"


@dataclass(frozen=True, slots=True)
class _Case:
    """One threshold, judged for one column."""

    limit: Threshold
    row: Row
    columns: Sequence[Column]
    number: int

    @property
    def name(self) -> str:
        """The column as sentences call it."""
        return _run_name(self.number, self.columns[self.number])

    @property
    def _pair_of_cells(self) -> tuple[Cell, Cell]:
        return self.row.cells[0], self.row.cells[self.number]

    def unknown(self) -> str:
        """Returns why figure or noise are unknown; "" where they are known."""
        base, cell = self._pair_of_cells
        for compared, owner in ((base, "the first run"), (cell, self.name)):
            if compared.value is None and (self.limit.relative or compared is cell):
                return f"{self.limit.text} cannot be judged for {owner}: {compared.why}"
        if (cell.noise if self.limit.relative else cell.half_width) is None:
            return f"{self.limit.text} cannot be judged: {self.name} has too few steps; {_FEW_STEPS}"
        return ""

    @property
    def _figure_bounds(self) -> tuple[float, float, float]:
        """The least and the most that the figure may be without what the machine added; its noise."""
        _, cell = self._pair_of_cells
        value = cell.value or 0.0
        if self.limit.relative:
            return cell.low or 0.0, cell.high or 0.0, cell.noise or 0.0
        low, high = (0.0, cell.slack) if self.row.more_is_better else (-cell.slack, 0.0)
        return value + low, value + high, cell.half_width or 0.0

    @property
    def _amount(self) -> float:
        base, limit = self.row.cells[0], self.limit
        return limit.amount * abs(base.value or 0.0) if limit.share else limit.amount

    def is_exceeded(self) -> bool:
        """Returns whether the figure is beyond the bound, whatever the noise and the machine added."""
        low, high, noise = self._figure_bounds
        return low - noise > self._amount if self.limit.above else high + noise < self._amount

    def is_undecided(self) -> bool:
        """Returns whether the figure may be beyond the bound, and twice beyond would not be found."""
        low, high, noise = self._figure_bounds
        may = high + noise > self._amount if self.limit.above else low - noise < self._amount
        return may and noise + high - low > self._needed_noise

    @property
    def _needed_noise(self) -> float:
        """The noise up to which the threshold is judged: its amount, or what is noise of any run."""
        metric, base_value = METRIC[self.row.name], self.row.cells[0].value or 0.0
        min_noise = metric.least * (1.0 if self.row.unit == "ratio" else abs(base_value))
        return max(abs(self._amount), min_noise)

    def needs(self) -> str:
        """Returns the sentence of an undecided case: what hides the answer, and what would give it."""
        noise = self._figure_bounds[2]
        has = format_cell(self.row, self.number)
        head = f"{self.limit.text} cannot be judged: {self.name} has {has}"
        if noise <= self._needed_noise:
            lacked = [share for c in self.columns if (share := c.lacked)]
            cause = self.columns[self.number].doubt or (
                f"ranks had no CPU for up to {human_ratio(max(lacked))} of the time"
                if lacked
                else "the steps of the runs are spread differently"
            )
            return f"{head}, and {cause}; give {REPEATS} repeats of each, in turns: a.1,a.2,..."
        count = self._needed_repeats()
        if count is None:
            return f"{head}, and more than {_MAX_REPEATS} repeats of each would be needed"
        return (
            f"{head}, and the noise is larger than the limit; by this noise {count} repeats of each "
            "would do, in turns: a.1,a.2,..."
        )

    def _needed_repeats(self) -> int | None:
        """Returns how many repeats of each column bring the noise to the limit; None for too many."""
        cells = self._pair_of_cells if self.limit.relative else self._pair_of_cells[1:]
        runs = [len(self.columns[n].runs) for n in (0, self.number)][-len(cells) :]
        spread = sum((cell.error or 0.0) ** 2 * n for cell, n in zip(cells, runs, strict=True))
        for count in range(max(2, *runs), _MAX_REPEATS + 1):
            error, freedom = math.sqrt(spread / count), len(cells) * (count - 1)
            if (half_width(Estimate(0.0, error, freedom)) or 0.0) <= self._needed_noise:
                return count
        return None
