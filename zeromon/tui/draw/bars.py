"""Bars: stacked, and against a limit. Pure; half a cell is the smallest difference that shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from zeromon.tui.draw.halves import NUMBERS, inked
from zeromon.tui.line import Line

Part = tuple[str, float]
"""Tone and size."""


def stacked(parts: Sequence[Part], whole: float, width: int, *, letters: bool = False) -> Line:
    """*parts* one after the other, *whole* being the full width."""
    return inked(_halves(parts, whole, width * 2), (" ", ""), letters=letters)


def _halves(parts: Sequence[Part], whole: float, most: int) -> bytearray:
    """Ends are rounded, not sizes, so that the sum is right."""
    made = bytearray()
    end = 0.0
    for tone, size in parts:
        end += max(0.0, size)
        upto = round(end / whole * most) if whole > 0 else 0
        made += bytes((NUMBERS[tone],)) * (min(most, upto) - len(made))
    return made.ljust(most, b"\0")


def gauge(
    value: float,
    whole: float,
    width: int,
    tone: str,
    *,
    limit: float | None = None,
    letters: bool = False,
) -> Line:
    """A bar of *value* on a rail of *whole*, with a tick at *limit*."""
    filled = round(min(1.0, max(0.0, value / whole)) * width) if whole > 0 else 0
    if value > 0 and not filled:
        filled = 1
    body = ["#" if letters else "█"] * filled + ["." if letters else "─"] * (width - filled)
    tones = [tone] * filled + ["faint"] * (width - filled)
    if limit is not None and whole > 0 and width:
        at = max(0, round(min(1.0, limit / whole) * width) - 1)
        body[at], tones[at] = "|" if letters else "┃", "bold"
    return [
        ("".join(text for text, _ in group), ink)
        for ink, group in groupby(zip(body, tones, strict=True), key=lambda cell: cell[1])
    ]
