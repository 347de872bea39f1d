"""A table as aligned text. Pure."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from zeromon.base.units import printable
from zeromon.readout.figures import Fields, Row

_WIDTH, _MIN_WIDTH = 80, 16
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(%|[mnu]?s|[kKMGT]?i?B)(\b|\W|$))")


def wrap_report_line(report_line: str, width: int) -> list[str]:
    """*report_line* of a report in *width* columns; a row of a table stays whole."""
    gaps = list(_GAP.finditer(report_line))
    if len(report_line) <= width or len(gaps) > 1:
        return [report_line]
    below = gaps[0].end() if gaps else len(report_line) - len(report_line.lstrip()) + 2
    indent = " " * min(below, width // 2)
    return wrap_paragraph(report_line, width, "", indent)


def wrap_paragraph(paragraph: str, width: int, bullet: str, indent: str) -> list[str]:
    """The lines of *paragraph* in *width* columns: the first behind *bullet*, others behind *indent*.

    A number and its unit stay on one line.
    """
    unbroken = _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", paragraph)
    wrapped = textwrap.wrap(
        unbroken, width, initial_indent=bullet, subsequent_indent=indent, break_on_hyphens=False
    )
    return [row.replace("\N{NO-BREAK SPACE}", " ") for row in wrapped]


def aligned_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned, each cell on its line: the first to the left, the others to the right."""
    header, rows = tuple(map(printable, header)), [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    table_rows = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(f"  {table_row}" for table_row in table_rows)


Column = tuple[str, Callable[[Row], str]]
"""The heading of a column, and what it has of a row."""


def column_table(rows: Iterable[Row], *columns: Column[Row], cuts: Sequence[int] = ()) -> str:
    """A table of *rows* with *columns*; with *cuts*, it is a :func:`fitted_table`."""
    cells = [[read_cell(row) for _, read_cell in columns] for row in rows]
    return fitted_table([heading for heading, _ in columns], cells, *cuts)


def field_table(rows: Iterable[Row], fields: Fields[Row], *names: str) -> str:
    """A table of *rows* with the fields *names*."""
    return column_table(rows, *((name, fields[name].text) for name in names))


def fitted_table(header: Sequence[str], rows: Sequence[Sequence[str]], *cuts: int) -> str:
    """A table in which cells of the columns *cuts* lose their middle, so that it has 80 columns.

    Those of the first of *cuts* lose it first.
    """
    cells = [list(map(printable, row)) for row in rows]
    for column in cuts:
        widths = [max(map(len, values)) + 2 for values in zip(header, *cells, strict=True)]
        max_width = max(_MIN_WIDTH, widths[column] - 2 - max(0, sum(widths) - _WIDTH))
        for row in cells:
            row[column] = _cut_out_middle(row[column], max_width)
    return aligned_table(header, cells)


def _cut_out_middle(cell: str, max_width: int) -> str:
    ahead = (max_width - 3) // 2
    return cell if len(cell) <= max_width else f"{cell[:ahead]}...{cell[ahead + 3 - max_width :]}"
