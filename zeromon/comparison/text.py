"""Figures, differences and rows of a comparison as text. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from zeromon.base.units import (
    human_bytes,
    human_count,
    human_params,
    human_ratio,
    human_seconds,
    printable,
)
from zeromon.comparison.comparison import Column, Comparison, Row, letter
from zeromon.comparison.environment import REPEATS, Difference

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
