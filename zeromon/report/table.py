"""A table as aligned text. Pure."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from zeromon.readout.figures import Fields, Row
from zeromon.units import printable

_WIDTH, _LEAST = 80, 16
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(%|[mnu]?s|[kKMGT]?i?B)(\b|\W|$))")


def wrapped_line(line: str, width: int) -> list[str]:
    """*line* of a report in *width* columns; a row of a table stays whole."""
    gaps = list(_GAP.finditer(line))
    if len(line) <= width or len(gaps) > 1:
        return [line]
    below = gaps[0].end() if gaps else len(line) - len(line.lstrip()) + 2
    indent = " " * min(below, width // 2)
    return wrap(line, width, "", indent)


def wrap(text: str, width: int, first: str, below: str) -> list[str]:
    """The lines of *text* in *width* columns, behind what *first* and those *below* it begin with.

    A number and its unit stay on one line.
    """
    whole = _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(
        whole, width, initial_indent=first, subsequent_indent=below, break_on_hyphens=False
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned, each cell on its line: the first to the left, the others to the right."""
    header, rows = tuple(map(printable, header)), [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(f"  {line}" for line in lines)


Column = tuple[str, Callable[[Row], str]]
"""The heading of a column, and what it has of a row."""


def column_table(rows: Iterable[Row], *columns: Column[Row], cuts: Sequence[int] = ()) -> str:
    """A table of *rows* with *columns*; with *cuts*, it is :func:`fitted`."""
    cells = [[read(row) for _, read in columns] for row in rows]
    return fitted([heading for heading, _ in columns], cells, *cuts)


def field_table(rows: Iterable[Row], fields: Fields[Row], *names: str) -> str:
    """A table of *rows* with the fields *names*."""
    return column_table(rows, *((name, fields[name].text) for name in names))


def fitted(header: Sequence[str], rows: Sequence[Sequence[str]], *cuts: int) -> str:
    """A table in which cells of the columns *cuts* lose their middle, so that it has 80 columns.

    Those of the first of *cuts* lose it first.
    """
    cells = [list(map(printable, row)) for row in rows]
    for column in cuts:
        widths = [max(map(len, one)) + 2 for one in zip(header, *cells, strict=True)]
        most = max(_LEAST, widths[column] - 2 - max(0, sum(widths) - _WIDTH))
        for row in cells:
            row[column] = _shortened(row[column], most)
    return table(header, cells)


def _shortened(text: str, most: int) -> str:
    ahead = (most - 3) // 2
    return text if len(text) <= most else f"{text[:ahead]}...{text[ahead + 3 - most :]}"
