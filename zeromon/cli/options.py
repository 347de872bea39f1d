"""How a verb declares its options, and the numbers that they take."""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeromon.errors import ExportError, ZeromonError, os_errors_as
from zeromon.probes.installation import install_hint
from zeromon.ring.files import replace_file
from zeromon.units import printable


def option(
    group: argparse._ActionsContainer,
    names: str,
    metavar: str,
    help: str,
    type: Callable[[str], Any] = str,
    default: Any = None,
    **more: Any,
) -> None:
    """Adds an option with a value; its *help* tells the *default*, unless that is empty."""
    told = f" (default: {default})" if default and "default" not in help else ""
    group.add_argument(
        *names.split(), metavar=metavar, help=help + told, type=type, default=default, **more
    )


def several(
    group: argparse._ActionsContainer, names: str, metavar: str, help: str, **more: Any
) -> None:
    """Adds an option with a value that may be given again: a list."""
    group.add_argument(
        *names.split(), metavar=metavar, help=help, action="append", default=[], **more
    )


def flag(group: argparse._ActionsContainer, names: str, help: str) -> None:
    """Adds an option without a value."""
    group.add_argument(*names.split(), action="store_true", help=help)


def positive(text: str) -> int:
    """Parses the value of an option that is a positive whole number."""
    number = int(text)
    if not 0 < number < 1 << 40:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return number


def whole(text: str) -> int:
    """Parses the value of an option that is a whole number, 0 or more; ``5e8`` is one, too."""
    number = float(text)
    if not 0 <= number < 1 << 40 or number != int(number):
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text}")
    return int(number)


def port(text: str) -> int:
    """Parses the value of an option that is the number of a TCP port; 0: any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, not {text}")
    return int(text)


def between(least: float, most: float = 1e18, *, above: bool = False) -> Callable[[str], float]:
    """Returns the parser of an option that is a number from *least*, or *above* it, to *most*."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value <= most or (above and value == least):
            bottom = f"above {least:g}" if above else f"{least:g} or more"
            top = f" and at most {most:g}" if most < 1e18 else ""
            raise argparse.ArgumentTypeError(f"must be {bottom}{top}, not {text}")
        return value

    return number


# ---- the output of verbs that make a document ---------------------------------------------------


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
    with os_errors_as(ExportError, f"write {printable(output)}"):
        replace_file(Path(output), text, private=False)
    sys.stderr.write(f"zeromon: wrote {printable(output)}\n")
