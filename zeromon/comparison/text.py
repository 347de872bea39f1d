"""Figures, differences and rows of a comparison as text. Pure."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zeromon.base.errors import CompareError
from zeromon.base.units import (
    human_bytes,
    human_count,
    human_params,
    human_ratio,
    human_seconds,
    printable,
)
from zeromon.comparison.comparison import Cell, Column, Comparison, Row, letter
from zeromon.comparison.environment import REPEATS, Difference
from zeromon.comparison.run_figures import METRIC, METRICS, PEAK_MEMORY
from zeromon.snapshot.noise import Estimate, half_width

_TIMES_AS_MUCH = 9.995

NOT_COMPARABLE = f"not comparable: the machine may be the reason; give {REPEATS} repeats of each"
"""Note on a difference that exceeds the noise and that a lack of CPUs or a neighbour may explain."""


def format_figure(value: float | None, unit: str) -> str:
    """Returns a figure as text with its unit; ``n/a`` for None."""
    if unit in _TEXTS or value is None or value >= 1000:
        return _TEXTS.get(unit, human_count)(value)
    return f"{value:#.3g}".rstrip(".")


_TEXTS = {"s": human_seconds, "bytes": human_bytes, "ratio": human_ratio, "count": human_count}


def format_change(row: Row, number: int) -> str:
    """Returns a column's difference to the first, ``+12.3 %``, ``+5.2 pp`` or ``+3``; "" if unknown."""
    cell, base = row.cells[number], row.cells[0].value
    return "" if cell.difference is None else _signed_change(cell.difference, base or 0.0, row.unit)


def format_cell(row: Row, number: int) -> str:
    """Returns the figure of a column with its difference: ``52.0 ms (+12.3 %, noise 1.1 %)``."""
    cell, base = row.cells[number], row.cells[0].value or 0.0
    amount = format_figure(cell.value, row.unit)
    if cell.difference is None or cell.noise is None:
        return amount
    noise = _signed_change(cell.noise, base, row.unit).lstrip("+")
    return f"{amount} ({format_change(row, number)}, noise {noise})"


def _signed_change(difference: float, base: float, unit: str) -> str:
    if unit == "ratio":
        return f"{difference * 100:+.1f} pp"
    if unit == "count":
        return f"{difference:+,.0f}" if difference else "0"
    if not base:
        sign = "-" if difference < 0 else "+"
        return sign + format_figure(abs(difference), unit) if difference else "0"
    share = difference / base
    return f"{share * 100:+.1f} %" if share < _TIMES_AS_MUCH else f"x {1 + share:,.0f}"


_GROUPS = (
    ("Time", ("step_time", "mean_step_time", "steps_per_second", "samples_per_second",
              "tokens_per_second", "exposed_share", "exposed_time", "data_wait_share", "offload_time",
              "skipped_steps")),
    ("Moved", ("sent_bytes", "offload_bytes")),
    ("Memory", ("peak_reserved", "peak_allocated", "headroom", "allocation_retries", "peak_rss",
                "largest_micro_batch")),
)  # fmt: skip
_ONLY_WHERE_THERE = frozenset(("offload_time", "offload_bytes", "allocation_retries"))


def steps_text(column: Column) -> str:
    """``54 of 60``: the steps that the figures are over, of all that were recorded."""
    of = f" of {human_count(column.taken)}" if column.taken > column.steps else ""
    return f"{human_count(column.steps)}{of}"


def configured_rows(comparison: Comparison) -> list[Difference]:
    """Returns what is not configured alike in all columns, then what differs in their environments."""
    rows = (
        Difference(name=name, values=tuple(describe(column) for column in comparison.columns))
        for name, describe in _CONFIGURED
    )
    return [*(row for row in rows if len(set(row.values)) > 1), *comparison.environment.differences]


_CONFIGURED: tuple[tuple[str, Callable[[Column], str]], ...] = (
    ("strategy", lambda column: column.strategy),
    ("parameters", lambda column: human_params(column.params)),
    ("ranks", lambda column: human_count(column.ranks)),
    ("micro-batch", lambda column: human_count(column.micro_batch)),
    ("micro-steps", lambda column: human_count(column.micro_steps)),
    ("effective batch", lambda column: human_count(column.effective_batch)),
)


def environment_lines(comparison: Comparison) -> list[str]:
    """Returns what differs in the environments of the columns, one line each, or that nothing does."""
    environment = comparison.environment
    sentences = [
        f"{row.name}: "
        + "; ".join(f"{letter(n)} {printable(value)}" for n, value in enumerate(row.values))
        for row in environment.differences
    ]
    if environment.same and not sentences:
        sentences = [f"the same in all {human_count(environment.same)} values"]
    if environment.unknown:
        sentences.append(f"not recorded for {', '.join(map(letter, environment.unknown))}")
    return sentences


def grouped(comparison: Comparison) -> Iterator[tuple[str, list[Row]]]:
    """Yields each group of rows with content, with the title of the group."""
    by_name = {row.name: row for row in comparison.rows}
    for title, names in _GROUPS:
        yield title, [by_name[name] for name in names if has_content(by_name[name])]
    roles = [row for row in comparison.rows if "." in row.name and has_content(row)]
    tiers = {row.name.partition(".")[0] for row in roles}
    if len(tiers) == 1:
        (tier,) = tiers
        yield (
            f"Memory by role ({tier})",
            [replace(row, label=row.label.removeprefix(f"{tier}: ")) for row in roles],
        )
    elif roles:
        yield "Memory by role", roles


def has_content(row: Row) -> bool:
    """Returns whether a row has content: a role with bytes, or a known figure in a column."""
    if "." in row.name or row.name in _ONLY_WHERE_THERE:
        return any(cell.value for cell in row.cells)
    return any(cell.value is not None for cell in row.cells)


# ---- thresholds ---------------------------------------------------------------------------------

# Thresholds on the differences of runs, for CI: ``peak_memory>+5%``, ``exposed_share>+5pp``. Pure.
# A run exceeds a threshold when the figure is beyond the bound by more than the noise and by more
# than the machine may have added. It passes when the figure is not, and the noise is small enough
# to find a figure twice beyond the bound; else the threshold is undecided, and does not pass. The
# same runs always get the same answer.

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
