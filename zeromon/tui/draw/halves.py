"""Half cells of tones, as bars and lanes are made of, and how they are inked. Pure."""

from __future__ import annotations

import re

from zeromon.tui.line import Line, Span, merged
from zeromon.tui.tones import LETTERS, PARTS

TONES = ("", *PARTS, "hidden")
"""A half cell holds the place of its tone in here; 0 is nothing."""
NUMBERS = {tone: number for number, tone in enumerate(TONES)}
ALIKE = re.compile(rb"(.)\1*", re.DOTALL)
"""Runs of equal bytes."""
_PAIRS_ALIKE = re.compile(rb"(..)\1*", re.DOTALL)  # matches begin at even places


def inked(halves: bytearray, empty: Span, *, letters: bool = False) -> Line:
    """Two halves a cell; *empty* is a cell of nothing. With *letters* told apart without colour."""
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
    if left == right:
        return "█", left
    if not right:
        return "▌", left
    return ("▐", right) if not left else ("▌", f"{left}|{right}")
