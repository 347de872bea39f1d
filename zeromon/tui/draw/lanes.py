"""Lanes over time: the last steps of each rank. Pure.

A step stands where it was, and is as long as it was. What is known of its inside are sums by phase, not
moments: they are drawn in one order, as shares. A gap between steps is a gap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from zeromon.snapshot import StepSummary
from zeromon.tui.draw.halves import NUMBERS, inked
from zeromon.tui.line import Line, Span, cells
from zeromon.tui.parts import of_step
from zeromon.tui.tones import PARTS
from zeromon.units import human_seconds

_NOTHING: tuple[Span, Span] = (("·", "faint"), (" ", ""))
"""Where no step is; with letters a blank, for a dot might be one."""


def lane(
    recent: Sequence[StepSummary], first_ns: int, last_ns: int, width: int, *, letters: bool = False
) -> Line:
    """The steps of one rank between two moments, by part."""
    halves = bytearray(width * 2)
    for step in _seen(recent, first_ns, last_ns):
        found = of_step(step)
        _fill(halves, step, [(name, found[name]) for name in PARTS], first_ns, last_ns)
    return inked(halves, _NOTHING[letters], letters=letters)


def communication(
    recent: Sequence[StepSummary], first_ns: int, last_ns: int, width: int, *, letters: bool = False
) -> Line:
    """Of each step, how much was communication: hidden behind compute, then exposed."""
    halves = bytearray(width * 2)
    for step in _seen(recent, first_ns, last_ns):
        if not step.idle:
            hidden = max(0, step.communication_ns - step.exposed_ns)
            parts = [("hidden", hidden), ("exposed", step.exposed_ns)]
            _fill(halves, step, parts, first_ns, last_ns)
    return inked(halves, _NOTHING[letters], letters=letters)


def _seen(recent: Sequence[StepSummary], first_ns: int, last_ns: int) -> Iterator[StepSummary]:
    for at in range(bisect_right(recent, first_ns, key=lambda step: step.end_ns), len(recent)):
        if recent[at].start_ns >= last_ns:
            return
        yield recent[at]


def _fill(
    halves: bytearray,
    step: StepSummary,
    parts: Sequence[tuple[str, int]],
    first_ns: int,
    last_ns: int,
) -> None:
    """Puts the parts of a step where they belong, as far as that is to be seen."""
    each = len(halves) / max(1, last_ns - first_ns)
    at = step.start_ns
    end = max(0, round((at - first_ns) * each))
    for name, spent in parts:
        if spent <= 0:
            continue
        begin, at = end, min(step.end_ns, at + spent)
        end = max(0, min(len(halves), round((at - first_ns) * each)))
        if end > begin:
            halves[begin:end] = bytes((NUMBERS[name],)) * (end - begin)


def ruler(first_ns: int, last_ns: int, now_ns: int, width: int) -> Line:
    """Time before the newest moment, at a few places."""
    body = [" "] * width
    for part in range(5):
        at = round(part / 4 * (width - 1))
        moment = first_ns + (last_ns - first_ns) * part / 4
        ago = (now_ns - moment) / 1e9
        text = f"-{human_seconds(ago)}" if ago > 1e-4 else "now"
        begin = min(max(0, at - (cells(text) if part == 4 else 0)), max(0, width - cells(text)))
        if all(sign == " " for sign in body[max(0, begin - 1) : begin + cells(text) + 1]):
            body[begin : begin + cells(text)] = text
    return [("".join(body)[:width], "dim")]


def numbers(recent: Sequence[StepSummary], first_ns: int, last_ns: int, width: int) -> Line:
    """The number of each step at its beginning, where there is room."""
    body = [" "] * width
    for step in recent:
        if step.end_ns <= first_ns or step.start_ns >= last_ns:
            continue
        at = round((step.start_ns - first_ns) / max(1, last_ns - first_ns) * width)
        text = f"▏{step.step}"
        if (
            at >= 0
            and at + len(text) < width
            and all(s == " " for s in body[max(0, at - 1) : at + len(text) + 1])
        ):
            body[at : at + len(text)] = text
    return [("".join(body), "dim")]
