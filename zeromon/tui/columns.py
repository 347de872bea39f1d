"""A table as data: its columns, their layout in a given width, and the order of its rows. Pure."""

import csv
import io
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from zeromon.base.units import formula_safe_cell
from zeromon.readout.figures import RATE, SECONDS, TEXT, Field, Fields, Unit
from zeromon.tui.line import Line, Span, clean, fit, text_tail

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column of a table whose rows are of type *Row*; text is left-aligned, numbers are not."""

    name: str
    size: int
    value: Callable[[Row], Any]
    """The sort key, which is also the value in an exported file: a number in base units, or text."""
    unit: Unit = TEXT
    tone: str | Callable[[Any], str] = ""
    """The style of a known value, or how it follows from the value."""
    keep: int = 0
    """Priority: in a narrow terminal, columns with a higher number are dropped first; 0: kept."""
    grows: bool = False
    ends: bool = False
    """True if the end of a text that is too long is shown, not its beginning."""
    left: bool | None = None
    """True if cells are left-aligned; None: as the unit is."""
    cell: Callable[[Row], Span] | None = None
    """The cell, where it is more than its value."""

    def show(self, row: Row) -> Span:
        """The cell of *row* with its style."""
        if self.cell is not None:
            return self.cell(row)
        value = self.value(row)
        if value is None:
            return ("-" if self.unit in (SECONDS, RATE) else "n/a"), "dim"
        cell_text = clean(str(value)) if self.unit is TEXT else self.unit.text(value)
        return cell_text, self.tone if isinstance(self.tone, str) else self.tone(value)

    @property
    def is_left_aligned(self) -> bool:
        """True if cells are left-aligned."""
        return self.unit is TEXT if self.left is None else self.left

    @property
    def export_heading(self) -> str:
        """The column's name in an exported file."""
        stem = self.name.replace(" ", "_")
        return f"{stem}_{self.unit.name}" if self.unit.name not in ("", stem) else stem


Columns = tuple[Column[Row], ...]


def column_of_field(fields: Fields[Row], name: str, size: int, **settings: Any) -> Column[Row]:
    """The column of a field that other views show as well; *settings*: other arguments of a column."""
    field = fields[name]
    if field.show is not None:
        settings["cell"] = _cell_of_field(field, settings.get("tone", ""))
    return Column(name, size, field.read, field.unit, **settings)


def _cell_of_field(field: Field[Row], tone: str) -> Callable[[Row], Span]:
    return lambda row: (clean(field.text(row)), tone)


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
    while len(chosen) > 1 and sum(c.size for c in chosen) > width:
        dropped = max(chosen, key=lambda c: (c.keep, columns.index(c)))
        if dropped.keep == 0:
            break
        chosen.remove(dropped)
    spare = max(0, width - sum(c.size for c in chosen))
    growing = next((c for c in chosen if c.grows), None)
    if growing is not chosen[-1]:
        spare = min(_MAX_GROWTH, spare)
    return [(c, c.size + (spare if c is growing else 0)) for c in chosen]


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
        cell_text, tone = column.show(row)
        if column.ends:
            cell_text = text_tail(cell_text, size - 1)
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
    sort_key = column.value
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
        writer.writerow([_csv_cell(column.value(row)) for column in sheet.columns])
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
