"""A table as data: columns, layout, order of rows, the user's filter and display options. Pure."""

import csv
import io
import math
import operator
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from zeromon.base.units import formula_safe_cell
from zeromon.readout.figures import FIGURES, SECONDS, WAITS, Figure
from zeromon.readout.tables import Column, Columns, Row
from zeromon.readout.text import leading_clauses
from zeromon.snapshot import RankSnapshot
from zeromon.tui.line import Line, clean, fit, text_tail


@dataclass(frozen=True, slots=True)
class TableExport(Generic[Row]):
    """A table to export: its name, columns and rows."""

    name: str
    columns: Columns[Row]
    rows: Sequence[Row]


_MAX_GROWTH = 48
"""Cells: on a wide terminal the figures behind a column stay near it."""


def fit_columns(columns: Columns[Row], width: int) -> list[tuple[Column[Row], int]]:
    """The columns that fit in *width*, with their widths; a growing column takes of what is left."""
    chosen = list(columns)
    while len(chosen) > 1 and sum(c.width for c in chosen) > width:
        dropped = max(chosen, key=lambda c: (c.priority, columns.index(c)))
        if dropped.priority == 0:
            break
        chosen.remove(dropped)
    spare = max(0, width - sum(c.width for c in chosen))
    growing = next((c for c in chosen if c.grows), None)
    if growing is not chosen[-1]:
        spare = min(_MAX_GROWTH, spare)
    return [(c, c.width + (spare if c is growing else 0)) for c in chosen]


def header_line(laid: Sequence[tuple[Column[Row], int]], order: str, *, down: bool) -> Line:
    """The line of column names; the column that rows are sorted by has an arrow."""
    spans: Line = []
    for column, size in laid:
        sign = ("▼" if down else "▲") if column.name == order else ""
        label = fit(column.name + sign, size - 1, right=not column.is_left_aligned)
        spans += [(label, "accent" if sign else "title"), (" ", "")]
    return spans


def row_spans(laid: Sequence[tuple[Column[Row], int]], row: Row) -> Line:
    """One row as a line; adjacent cells without a tone share a span, which is faster to draw."""
    spans: Line = []
    bare = ""
    for column, size in laid:
        cell_text, tone = column.cell(row)
        cell_text = clean(cell_text)
        if column.ends:
            cell_text = text_tail(cell_text, size - 1)
        elif column.grows:
            cell_text = leading_clauses(cell_text, size - 1)
        cell_text = fit(cell_text, size - 1, right=not column.is_left_aligned)
        if tone:
            spans += [(bare, ""), (cell_text, tone)] if bare else [(cell_text, tone)]
            bare = " "
        else:
            bare += cell_text + " "
    return [*spans, (bare, "")]


def sort_rows(columns: Columns[Row], rows: Sequence[Row], order: str, *, down: bool) -> list[Row]:
    """*rows* sorted by the column named *order*; rows without a value come last."""
    column = next((c for c in columns if c.name == order), None)
    if column is None:
        return list(rows)
    sort_key = column.read
    keyed_rows = [(value, row) for row in rows if (value := sort_key(row)) is not None]
    keyed_rows.sort(key=lambda pair: pair[0], reverse=down)
    unknown = [row for row in rows if sort_key(row) is None] if len(keyed_rows) < len(rows) else []
    return [row for _, row in keyed_rows] + unknown


# ---- files that the user saves ------------------------------------------------------------------

_FONTS = re.compile(r"@font-face\s*{[^}]*}")


def csv_text(sheet: TableExport[Row]) -> str:
    """*sheet* as CSV: base units, empty where unknown.

    Text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([column.export_heading or "severity" for column in sheet.columns])
    for row in sheet.rows:
        writer.writerow([_csv_cell(column.read(row)) for column in sheet.columns])
    return buffer.getvalue()


def _csv_cell(value: Any) -> Any:
    if not isinstance(value, str):
        return "" if value is None else value
    return formula_safe_cell(clean(value))


def svg_without_fonts(svg: str) -> str:
    """*svg* without the fonts that a viewer would download."""
    return _FONTS.sub("", svg)


def save_new_file(content: str, run: str, subject: str, suffix: str) -> Path:
    """Writes *content* to a new private file in the working folder, or at home; raises OSError."""
    timestamp = time.strftime("%H%M%S")
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", f"zeromon-{run}-{subject}-{timestamp}")
    folder = Path.cwd() if os.access(Path.cwd(), os.W_OK) else Path.home()
    for number in range(1, 100):
        path = folder / (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        return path
    raise FileExistsError(f"{folder} has too many files of that name")


# ---- the filter of ranks that the user types -----------------------------------------------------

# Words are joined by spaces, and all must hold: ``3`` or ``0-7,16`` are ranks; ``exposed>10`` and
# ``step<=0.5`` compare a column; anything else must be part of the node, unit, state or device.

Test = Callable[[RankSnapshot], bool]

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_COMPARED = re.compile(r"([a-z]+)(<=|>=|<|>|=)(-?\d+(?:\.\d+)?)%?")
_SIGNS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq,
}  # fmt: skip


def _scaled_reader(figure: Figure) -> Callable[[RankSnapshot], float | None]:
    """Ratios in %, bytes in GiB; seconds as they are."""
    if figure.unit is SECONDS:
        return figure.of_rank
    return lambda rank: figure.unit.scaled(figure.of_rank(rank))


COMPARED: dict[str, Callable[[RankSnapshot], float | None]] = {
    "rank": lambda rank: rank.rank,
    **{figure.name: _scaled_reader(figure) for figure in FIGURES},
    "wait": _scaled_reader(WAITS),
}
"""Names that can be compared: seconds, %, GiB."""


def parse_rank_filter(filter_text: str) -> Test | None:
    """The test of a rank that *filter_text* describes; None for an empty filter."""
    tests = [_parse_condition(condition) for condition in filter_text.lower().split()]
    if not tests:
        return None
    if len(tests) == 1:
        return tests[0]
    return lambda rank: all(test(rank) for test in tests)


def _parse_condition(condition: str) -> Test:
    if _RANGES.fullmatch(condition):
        spans = [range_text.partition("-") for range_text in condition.split(",")]
        bounds = [(int(low), int(high or low)) for low, _, high in spans]
        return lambda rank: any(low <= rank.rank <= high for low, high in bounds)
    compared = _COMPARED.fullmatch(condition)
    if compared is not None and compared[1] in COMPARED:
        reader, compare, bound = COMPARED[compared[1]], _SIGNS[compared[2]], float(compared[3])

        def holds_for(rank: RankSnapshot) -> bool:
            value = reader(rank)
            return value is not None and compare(value, bound)

        return holds_for

    def is_named(rank: RankSnapshot) -> bool:
        state = rank.status.ended or rank.steps.phase
        names = (rank.node, rank.steps.unit, state, rank.device, rank.strategy)
        return any(condition in name.lower() for name in names)

    return is_named


# ---- how the user wants values to be shown -------------------------------------------------------

WHOLE_RUN = -1
WINDOWS = (0, 60, 120, 250, 500, WHOLE_RUN)
"""Numbers of steps that charts show; 0: as many as fit, WHOLE: all steps of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayOptions:
    """Everything that keys and options change about how a snapshot is drawn."""

    shares: bool = False
    """Shares of a step and of the capacity instead of time and bytes."""
    window: int = 0
    letters: bool = False
    """No colour: letters distinguish the parts."""
    tokens_per_step: int = 0
    """Tokens per step of all ranks together; 0: unknown."""
    peak_flops: float = 0.0
    """Dense peak of one device in the training data type, FLOP/s; 0: unknown."""


def nice_ceiling(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 5, 8, 10, ... from *value* on: the axis seldom changes."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(value))
    steps = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 10.0)
    return next((m * magnitude for m in steps if m * magnitude >= value * (1 - 1e-9)), value)


def format_three_digits(value: float) -> str:
    """*value* with three digits, or with all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
