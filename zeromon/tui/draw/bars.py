"""Draws bars, stacked and against a limit, and turns half cells into text. Pure."""

import re
from collections.abc import Sequence
from itertools import groupby

from zeromon.readout.breakdown import PARTS
from zeromon.tui.line import Line, Span, merged

TONES = ("", *PARTS, "hidden", "untimed")
"""The styles of half cells: a half cell holds an index into this; 0 is empty."""
LETTERS = {
    "forward": "F", "backward": "B", "optimizer": "O", "cpu_optimizer": "C", "exposed": "x",
    "data_wait": "d", "evaluation": "E", "checkpoint": "K", "garbage_collection": "G",
    "compile": "M", "generation": "g", "other": "-", "hidden": "=", "untimed": "?",
}  # fmt: skip
"""The letters of the parts of a step, for screens without colour."""
NUMBERS = {tone: number for number, tone in enumerate(TONES)}
ALIKE = re.compile(rb"(.)\1*", re.DOTALL)
"""Runs of equal bytes."""
_PAIRS_ALIKE = re.compile(rb"(..)\1*", re.DOTALL)  # matches begin at even positions


def styled(halves: bytearray, empty: Span, *, letters: bool = False) -> Line:
    """Returns *halves* as text, two per cell; *empty* is the text of an empty cell.

    *letters*: letters instead of colours.
    """
    line: Line = []
    for run in _PAIRS_ALIKE.finditer(halves):
        left, right = run[1]
        sign, tone = empty
        if letters:
            sign, tone = (LETTERS[TONES[left or right]], "") if left or right else empty
        elif left or right:
            sign, tone = _cell(TONES[left], TONES[right])
        line.append((sign * ((run.end() - run.start()) // 2), tone))
    return merged(line)


def _cell(left: str, right: str) -> Span:
    if "untimed" in (left, right):
        return LETTERS["untimed"], "faint"
    if left == right:
        return "█", left
    if not right:
        return "▌", left
    return ("▐", right) if not left else ("▌", f"{left}|{right}")


Part = tuple[str, float]
"""Style and size."""


def stacked(parts: Sequence[Part], whole: float, width: int, *, letters: bool = False) -> Line:
    """Returns a bar of *parts* one after the other; *whole* is the size of the full width."""
    return styled(_halves(parts, whole, width * 2), (" ", ""), letters=letters)


def _halves(parts: Sequence[Part], whole: float, most: int) -> bytearray:
    """The parts as half cells. Rounds the ends, not the sizes, so that the sum is exact."""
    halves = bytearray()
    end = 0.0
    for tone, size in parts:
        end += max(0.0, size)
        upto = round(end / whole * most) if whole > 0 else 0
        halves += bytes((NUMBERS[tone],)) * (min(most, upto) - len(halves))
    return halves.ljust(most, b"\0")


def gauge(
    value: float,
    whole: float,
    width: int,
    tone: str,
    *,
    limit: float | None = None,
    letters: bool = False,
) -> Line:
    """Returns a bar of *value* in a track of *whole*, with a tick at *limit*."""
    filled = round(min(1.0, max(0.0, value / whole)) * width) if whole > 0 else 0
    if value > 0 and not filled:
        filled = 1
    body = ["#" if letters else "█"] * filled + ["." if letters else "─"] * (width - filled)
    tones = [tone] * filled + ["faint"] * (width - filled)
    if limit is not None and whole > 0 and width:
        at = max(0, round(min(1.0, limit / whole) * width) - 1)
        body[at], tones[at] = "|" if letters else "┃", "bold"
    return [
        ("".join(text for text, _ in group), tone)
        for tone, group in groupby(zip(body, tones, strict=True), key=lambda cell: cell[1])
    ]
