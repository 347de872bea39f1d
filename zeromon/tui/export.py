"""Files that the user saves: a table as CSV, the screen as SVG."""

import csv
import io
import os
import re
import time
from pathlib import Path
from typing import Any

from zeromon.tui.columns import Row, TableExport
from zeromon.tui.line import clean
from zeromon.units import no_formula

_FONTS = re.compile(r"@font-face\s*{[^}]*}")


def csv_text(sheet: TableExport[Row]) -> str:
    """*sheet* as CSV: base units, empty where unknown.

    Text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.heading or "severity" for column in sheet.columns])
    for row in sheet.rows:
        writer.writerow([_cell(column.value(row)) for column in sheet.columns])
    return out.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return "" if value is None else value
    return no_formula(clean(value))


def without_fonts(svg: str) -> str:
    """*svg* without the fonts that a viewer would download."""
    return _FONTS.sub("", svg)


def save(text: str, run: str, what: str, suffix: str) -> Path:
    """Writes *text* to a new private file in the working folder, or at home; raises OSError."""
    moment = time.strftime("%H%M%S")
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", f"zeromon-{run}-{what}-{moment}")
    folder = Path.cwd() if os.access(Path.cwd(), os.W_OK) else Path.home()
    for number in range(1, 100):
        path = folder / (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return path
    raise FileExistsError(f"{folder} has too many files of that name")
