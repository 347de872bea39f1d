"""Where verbs put a document: standard output, or a file that is replaced as a whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zeromon.errors import ExportError
from zeromon.units import printable


def write(text: str, output: str | None) -> None:
    """Writes *text* to the file *output*, or prints it; raises :class:`ExportError`."""
    if output is None:
        sys.stdout.write(text)
        return
    path = Path(output)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ExportError(f"cannot write {printable(output)}: {error.strerror}") from error
    sys.stderr.write(f"zeromon: wrote {printable(output)}\n")
