"""How a verb declares its options, and the numbers that they take."""

import argparse
from collections.abc import Callable
from typing import Any


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
