"""How a verb declares its options, and the numbers that they take."""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeromon.base.errors import ExportError, ZeromonError, os_errors_as
from zeromon.base.units import printable
from zeromon.probes.installation import package_install_hint
from zeromon.ring.files import replace_file


def add_option(
    group: argparse._ActionsContainer,
    names: str,
    metavar: str,
    help: str,
    type: Callable[[str], Any] = str,
    default: Any = None,
    **extra: Any,
) -> None:
    """Adds an option with a value; its *help* tells the *default*, unless that is empty."""
    note = f" (default: {default})" if default and "default" not in help else ""
    group.add_argument(
        *names.split(), metavar=metavar, help=help + note, type=type, default=default, **extra
    )


def add_list(
    group: argparse._ActionsContainer, names: str, metavar: str, help: str, **extra: Any
) -> None:
    """Adds an option with a value that may be given again: a list."""
    group.add_argument(
        *names.split(), metavar=metavar, help=help, action="append", default=[], **extra
    )


def add_flag(group: argparse._ActionsContainer, names: str, help: str) -> None:
    """Adds an option without a value."""
    group.add_argument(*names.split(), action="store_true", help=help)


def positive(typed: str) -> int:
    """Parses the value of an option that is a positive whole number."""
    number = int(typed)
    if not 0 < number < 1 << 40:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {typed}")
    return number


def whole(typed: str) -> int:
    """Parses the value of an option that is a whole number, 0 or more; ``5e8`` is one, too."""
    number = float(typed)
    if not 0 <= number < 1 << 40 or number != int(number):
        raise argparse.ArgumentTypeError(f"must be a whole number, not {typed}")
    return int(number)


def tcp_port(typed: str) -> int:
    """Parses the value of an option that is the number of a TCP port; 0: any free one."""
    if not typed.isdecimal() or int(typed) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, not {typed}")
    return int(typed)


def in_range(low: float, high: float = 1e18, *, above: bool = False) -> Callable[[str], float]:
    """Returns the parser of an option that is a number from *low*, or *above* it, to *high*."""

    def parse_number(typed: str) -> float:
        value = float(typed)
        if not low <= value <= high or (above and value == low):
            bottom = f"above {low:g}" if above else f"{low:g} or more"
            top = f" and at most {high:g}" if high < 1e18 else ""
            raise argparse.ArgumentTypeError(f"must be {bottom}{top}, not {typed}")
        return value

    return parse_number


# ---- the output of verbs that make a document ---------------------------------------------------


def check_format(path: str | None, *suffixes: str) -> None:
    """Raises :class:`ExportError` for a file whose name promises a format that is not written."""
    suffix = Path(path or "").suffix.lower()
    if suffix and suffix not in suffixes:
        formats = " and ".join(suffixes)
        raise ExportError(
            f"{printable(str(path))}: {suffix} is not a format of -o", f"It writes {formats}."
        )


def import_extra(module: str, purpose: str, extra: str) -> Any:
    """Imports *module* for *purpose*; raises :class:`ZeromonError` where a package is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{purpose} needs a package that is not installed ({error.name})"
        raise ZeromonError(message, package_install_hint(extra)) from error


def draw_module(module: str) -> Any:
    """A module of zeromon_dashboard that draws."""
    return import_extra(f"zeromon_dashboard.{module}", "-o", "dashboard")


def write_text(content: str, output: str | None) -> None:
    """Writes *content* to the file *output*, or prints it; raises :class:`ExportError`."""
    if output is None:
        sys.stdout.write(content)
        return
    with os_errors_as(ExportError, f"write {printable(output)}"):
        replace_file(Path(output), content, private=False)
    sys.stderr.write(f"zeromon: wrote {printable(output)}\n")
