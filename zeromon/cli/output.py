"""The output of verbs that make a document: standard output, or a file that is replaced atomically."""

import importlib
import sys
from pathlib import Path
from typing import Any

from zeromon.errors import ExportError, ZeromonError
from zeromon.probes.installation import install_hint
from zeromon.ring.files import replace_file
from zeromon.units import printable


def refuse_format(path: str | None, *suffixes: str) -> None:
    """Raises :class:`ExportError` for a file whose name promises a format that is not written."""
    suffix = Path(path or "").suffix.lower()
    if suffix and suffix not in suffixes:
        formats = " and ".join(suffixes)
        raise ExportError(
            f"{printable(str(path))}: {suffix} is not a format of -o", f"It writes {formats}."
        )


def package(module: str, what: str, extra: str) -> Any:
    """Imports *module* for *what*; raises :class:`ZeromonError` where a package is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        text = f"{what} needs a package that is not installed ({error.name})"
        raise ZeromonError(text, install_hint(extra)) from error


def dashboard(module: str) -> Any:
    """A module of zeromon_dashboard that draws."""
    return package(f"zeromon_dashboard.{module}", "-o", "dashboard")


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
