"""Draws bars: stacked, and against a limit. Pure; the resolution is half a cell."""

from collections.abc import Sequence
from itertools import groupby

from zeromon.tui.draw.half_blocks import NUMBERS, styled
from zeromon.tui.line import Line

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
