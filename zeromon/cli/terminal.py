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

from zeromon.base import can_rewrite_lines
from zeromon.base.units import printable_lines, wrap_report_line

BOLD, RED, GREEN, YELLOW = 1, 31, 32, 33
_PATIENCE_SECONDS = 1.0
_COLOURS = (
    (re.compile(r"\s*!! |.*: (dead|dying|stalled): |  verdict   (dead|dying|stalled)\b|  ✖ "), RED),
    (re.compile(r"\s?! |  verdict   (slow|at risk)\b|  ▲ "), YELLOW),
    (re.compile(r"  verdict   healthy\b|  ● |\s+\+ "), GREEN),
    (re.compile(r"\s+- "), RED),
    (re.compile(r"(?!note: |seconds: )\S.*[^.]$"), BOLD),
)
"""The first that a line begins with: severities, the verdict, the lines of a diff, headings."""


def is_coloured(stream: TextIO) -> bool:
    """Returns whether *stream* is a terminal whose user wants colour: https://no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint_text(message: str, colour: int) -> str:
    """*message* in a colour of the terminal's own palette."""
    return f"\x1b[{colour}m{message}\x1b[0m"


def show_text(output: str) -> None:
    """Prints *output*, no control characters: plain in a pipe, wrapped and coloured at a terminal."""
    coloured = is_coloured(sys.stdout)
    sys.stdout.write(style_output(printable_lines(output), output_columns(), coloured=coloured))


def output_columns() -> int:
    """Columns of the terminal of stdout; a pipe has no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def show_json(content: Any) -> None:
    """Prints *content*, dataclasses included, as one line of JSON."""
    sys.stdout.write(msgspec.json.encode(content).decode() + "\n")


def show_progress(message: str) -> None:
    """Replaces the line of progress on stderr, where that is possible; "" removes it."""
    if can_rewrite_lines(sys.stderr):
        sys.stderr.write(f"\r\x1b[K{message and f'zeromon: {message}'}")
        sys.stderr.flush()


def style_output(output: str, width: int, *, coloured: bool) -> str:
    """*output* for a terminal of *width* columns. Lines of a table are not wrapped. Pure."""
    styled_rows = []
    for paragraph in output.split("\n"):
        colour = next((colour for mark, colour in _COLOURS if mark.match(paragraph)), None)
        rows = wrap_report_line(paragraph, width)
        styled_rows += [paint_text(row, colour) for row in rows] if coloured and colour else rows
    return "\n".join(styled_rows)


@contextmanager
def show_working(activity: str) -> Iterator[None]:
    """Shows *activity* on stderr while work takes longer than a second, where it can be removed."""
    if not can_rewrite_lines(sys.stderr):
        yield
        return
    spinners: list[Any] = []
    timer = threading.Timer(_PATIENCE_SECONDS, lambda: spinners.append(_start_spinner(activity)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # cancel does not stop a timer that has fired: its spinner would start below and never end
        timer.join()
        for status in spinners:
            status.stop()


def _start_spinner(activity: str) -> Any:
    from rich.console import Console  # comes with textual; imported where it is needed

    status = Console(stderr=True).status(f"zeromon: {activity} ...", spinner="line")
    status.start()
    return status
