"""The output of verbs that make a document: standard output, or a file that is replaced atomically."""

from __future__ import annotations

import sys
from pathlib import Path

from zeromon.errors import ExportError
from zeromon.ring.atomic import replace_file
from zeromon.units import printable


def write(text: str, output: str | None) -> None:
    """Writes *text* to the file *output*, or prints it; raises :class:`ExportError`."""
    if output is None:
        sys.stdout.write(text)
        return
    try:
        replace_file(Path(output), text, private=False)
    except OSError as error:
        raise ExportError(f"cannot write {printable(output)}: {error.strerror}") from error
    sys.stderr.write(f"zeromon: wrote {printable(output)}\n")
