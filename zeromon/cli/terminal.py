"""Output for a terminal, not for a pipe: colour, wrapped lines, a sign of life while work is done."""

import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec

from zeromon.report.table import wrapped_line
from zeromon.units import printable_lines

BOLD, RED, GREEN, YELLOW = 1, 31, 32, 33
_PATIENCE_SECONDS = 1.0
_COLOURS = (
    (re.compile(r"\s*!! |.*: (dead|dying|stalled): |  verdict   (dead|dying|stalled)\b"), RED),
    (re.compile(r"\s?! |  verdict   (slow|at risk)\b"), YELLOW),
    (re.compile(r"  verdict   healthy\b|\s+\+ "), GREEN),
    (re.compile(r"\s+- "), RED),
    (re.compile(r"\S.*[^.]$"), BOLD),
)
"""The first that a line begins with: severities, the verdict, the lines of a diff, headings."""


def is_coloured(stream: TextIO) -> bool:
    """Returns whether *stream* is a terminal whose user wants colour: https://no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, colour: int) -> str:
    """*text* in a colour of the terminal's own palette."""
    return f"\x1b[{colour}m{text}\x1b[0m"


def show(text: str) -> None:
    """Prints *text* without control characters: plain in a pipe, wrapped and coloured at a terminal."""
    text = printable_lines(text)
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = styled(text, width, coloured=is_coloured(sys.stdout))
    sys.stdout.write(text)


def show_json(content: Any) -> None:
    """Prints *content*, dataclasses included, as one line of JSON."""
    sys.stdout.write(msgspec.json.encode(content).decode() + "\n")


def status(text: str) -> None:
    """Replaces the line of progress on stderr, where that is a terminal; "" removes it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text and f'zeromon: {text}'}")
        sys.stderr.flush()


def styled(text: str, width: int, *, coloured: bool) -> str:
    """*text* for a terminal of *width* columns. Lines of a table are not wrapped. Pure."""
    lines = []
    for line in text.split("\n"):
        colour = next((colour for mark, colour in _COLOURS if mark.match(line)), None)
        parts = wrapped_line(line, width)
        lines += [painted(part, colour) for part in parts] if coloured and colour else parts
    return "\n".join(lines)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Shows *text* on stderr while work takes longer than a second, where that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    shown: list[Any] = []
    timer = threading.Timer(_PATIENCE_SECONDS, lambda: shown.append(_status(text)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for status in shown:
            status.stop()


def _status(text: str) -> Any:
    from rich.console import Console  # comes with textual; imported where it is needed

    status = Console(stderr=True).status(f"zeromon: {text} ...", spinner="line")
    status.start()
    return status
