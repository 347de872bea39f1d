"""Draws bars, stacked and against a limit, and turns half cells into text. Pure."""

import re
from collections.abc import Sequence
from itertools import groupby

from zeromon.readout.breakdown import PARTS
from zeromon.tui.line import Line, Span, merge_equal_tones

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


def style_half_cells(halves: bytearray, empty: Span, *, letters: bool = False) -> Line:
    """Returns *halves* as text, two per cell; *empty* is the text of an empty cell.

    *letters*: letters instead of colours.
    """
    spans: Line = []
    for run in _PAIRS_ALIKE.finditer(halves):
        left, right = run[1]
        sign, tone = empty
        if letters:
            sign, tone = (LETTERS[TONES[left or right]], "") if left or right else empty
        elif left or right:
            sign, tone = _span_of_halves(TONES[left], TONES[right])
        spans.append((sign * ((run.end() - run.start()) // 2), tone))
    return merge_equal_tones(spans)


def _span_of_halves(left_tone: str, right_tone: str) -> Span:
    if "untimed" in (left_tone, right_tone):
        return LETTERS["untimed"], "faint"
    if left_tone == right_tone:
        return "█", left_tone
    if not right_tone:
        return "▌", left_tone
    return ("▐", right_tone) if not left_tone else ("▌", f"{left_tone}|{right_tone}")


Part = tuple[str, float]
"""Style and size."""


def stacked_bar(sizes: Sequence[Part], scale: float, width: int, *, letters: bool = False) -> Line:
    """Returns a bar of *sizes* one after the other; *scale* is the size of the full width."""
    return style_half_cells(_halves_of_sizes(sizes, scale, width * 2), (" ", ""), letters=letters)


def _halves_of_sizes(sizes: Sequence[Part], scale: float, half_cells: int) -> bytearray:
    """The parts as half cells. Rounds the ends, not the sizes, so that the sum is exact."""
    halves = bytearray()
    position = 0.0
    for tone, size in sizes:
        position += max(0.0, size)
        upto = round(position / scale * half_cells) if scale > 0 else 0
        halves += bytes((NUMBERS[tone],)) * (min(half_cells, upto) - len(halves))
    return halves.ljust(half_cells, b"\0")


def draw_gauge(
    value: float,
    scale: float,
    width: int,
    tone: str,
    *,
    limit: float | None = None,
    letters: bool = False,
) -> Line:
    """Returns a bar of *value* in a track of *scale*, with a tick at *limit*."""
    filled = round(min(1.0, max(0.0, value / scale)) * width) if scale > 0 else 0
    if value > 0 and not filled:
        filled = 1
    body = ["#" if letters else "█"] * filled + ["." if letters else "─"] * (width - filled)
    tones = [tone] * filled + ["faint"] * (width - filled)
    if limit is not None and scale > 0 and width:
        at = max(0, round(min(1.0, limit / scale) * width) - 1)
        body[at], tones[at] = "|" if letters else "┃", "bold"
    return [
        ("".join(sign for sign, _ in group), tone)
        for tone, group in groupby(zip(body, tones, strict=True), key=lambda cell: cell[1])
    ]
