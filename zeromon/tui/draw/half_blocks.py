"""Turns half cells into text, for bars and lanes. Pure."""

import re

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
