"""Draws lanes over time: the last steps of each rank. Pure.

Steps and the gaps between them have their true position and length. Within a step only sums by phase are
known, not times: a lane draws them as shares, in the order of a step: what is exposed ends its phase.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from zeromon.base.units import human_seconds
from zeromon.readout.breakdown import PHASES, RECORDED
from zeromon.readout.text import exposed_part
from zeromon.snapshot import StepSummary
from zeromon.snapshot.step import LaneSpan, Stream
from zeromon.tui.draw.bars import NUMBERS, style_half_cells
from zeromon.tui.line import Line, Span, cells, fit

_ORDER = ("data_wait", *(phase for phase in PHASES if phase != "data_wait"))
NOTHING: tuple[Span, Span] = (("·", "faint"), (" ", ""))
"""The cell where there is no step, with colour and without."""


def draw_step_lane(
    recent: Sequence[StepSummary], first_ns: int, last_ns: int, width: int, *, letters: bool = False
) -> Line:
    """Returns the steps of one rank between two times, divided into parts."""
    halves = bytearray(width * 2)
    for step in _steps_in(recent, first_ns, last_ns):
        durations: list[tuple[str, int]] = []
        for phase, unexposed, exposed in _split_phase_times(step):
            durations += [(phase, unexposed), ("exposed", exposed)]
        _fill_step_parts(halves, step, durations, first_ns, last_ns)
    return style_half_cells(halves, NOTHING[letters], letters=letters)


def draw_communication(
    recent: Sequence[StepSummary], first_ns: int, last_ns: int, width: int, *, letters: bool = False
) -> Line:
    """Returns the communication of each step: the exposed below its phase, the hidden before it.

    The hidden is known of a whole step alone: it is drawn where some is exposed, else at the start.
    """
    halves = bytearray(width * 2)
    for step in _steps_in(recent, first_ns, last_ns):
        _fill_step_parts(halves, step, _split_communication(step), first_ns, last_ns)
    return style_half_cells(halves, NOTHING[letters], letters=letters)


def _split_phase_times(step: StepSummary) -> Iterator[tuple[str, int, int]]:
    """(phase, its nanoseconds without what is exposed, what is exposed), in the order of a step."""
    phase_times = dict(zip(RECORDED, step.phase_ns, strict=False))
    exposed: dict[str, int] = {}
    if step.timed:
        exposed = dict(zip(RECORDED, step.phase_exposed_ns, strict=False))
    for phase in _ORDER:
        total = phase_times.get(phase, 0)
        waits = min(total, exposed.get(phase, 0))
        yield phase, total - waits, waits


def _split_communication(step: StepSummary) -> Iterator[tuple[str, int]]:
    if not step.timed:
        yield "untimed", step.end_ns - step.start_ns
        return
    hidden, phases = max(0, step.communication_ns - step.exposed_ns), list(_split_phase_times(step))
    total = sum(exposed for _, _, exposed in phases)
    if not total:
        yield from (("hidden", hidden), ("exposed", step.exposed_ns))
        return
    for _, unexposed, exposed in phases:
        hidden_part = min(unexposed, hidden * exposed // total)
        yield from (("", unexposed - hidden_part), ("hidden", hidden_part), ("exposed", exposed))


def _steps_in(recent: Sequence[StepSummary], first_ns: int, last_ns: int) -> Iterator[StepSummary]:
    for at in range(bisect_right(recent, first_ns, key=lambda step: step.end_ns), len(recent)):
        if recent[at].start_ns >= last_ns:
            return
        yield recent[at]


def _fill_step_parts(
    halves: bytearray,
    step: StepSummary,
    durations: Iterable[tuple[str, int]],
    first_ns: int,
    last_ns: int,
) -> None:
    """Draws the parts of a step, clipped to the lane."""
    scale = len(halves) / max(1, last_ns - first_ns)
    at = step.start_ns
    stop = max(0, round((at - first_ns) * scale))
    for name, duration in durations:
        if duration <= 0:
            continue
        start, at = stop, min(step.end_ns, at + duration)
        stop = max(0, min(len(halves), round((at - first_ns) * scale)))
        if name and stop > start:
            halves[start:stop] = bytes((NUMBERS[name],)) * (stop - start)


def age_labels(now_ns: int) -> Callable[[float], str]:
    """Labels of a ruler: how long before *now_ns* a moment was."""

    def label_age(at_ns: float) -> str:
        age = (now_ns - at_ns) / 1e9
        return f"-{human_seconds(age)}" if age > 1e-4 else "now"

    return label_age


def draw_ruler(first_ns: int, last_ns: int, width: int, text_of: Callable[[float], str]) -> Line:
    """Returns five labels, each the text of the moment at its place."""
    body = [" "] * width
    for tick in range(5):
        at = round(tick / 4 * (width - 1))
        label = text_of(first_ns + (last_ns - first_ns) * tick / 4)
        start = min(max(0, at - (cells(label) if tick == 4 else 0)), max(0, width - cells(label)))
        if all(sign == " " for sign in body[max(0, start - 1) : start + cells(label) + 1]):
            body[start : start + cells(label)] = label
    return [("".join(body)[:width], "dim")]


def draw_step_numbers(
    steps: Iterable[tuple[int, int, int]], first_ns: int, last_ns: int, width: int
) -> Line:
    """Returns the numbers of (number, begin, end) at their beginnings, where they fit."""
    body = [" "] * width
    for number, begin_ns, end_ns in steps:
        if end_ns <= first_ns or begin_ns >= last_ns:
            continue
        at = round((begin_ns - first_ns) / max(1, last_ns - first_ns) * width)
        label = f"▏{number}"
        if (
            at >= 0
            and at + len(label) < width
            and all(s == " " for s in body[max(0, at - 1) : at + len(label) + 1])
        ):
            body[at : at + len(label)] = label
    return [("".join(body), "dim")]


# ---- spans: the phases and the collectives of a rank at their true moments -----------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """The time that is shown, nanoseconds, and the cells that it has."""

    first_ns: int
    last_ns: int
    width: int

    def halves(self, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """The half cells of a span, at least one where it is shown at all; empty elsewhere."""
        if end_ns < self.first_ns or begin_ns > self.last_ns:
            return 0, 0
        half_cells = 2 * self.width
        scale = half_cells / max(1, self.last_ns - self.first_ns)
        start = min(half_cells - 1, max(0, round((begin_ns - self.first_ns) * scale)))
        return start, min(half_cells, max(start + 1, round((end_ns - self.first_ns) * scale)))


def draw_span_lane(
    spans: Iterable[LaneSpan], blocked: Iterable[LaneSpan], axis: Axis, *, letters: bool = False
) -> Line:
    """Returns *spans* on one lane, and over them the exposed part of *blocked*."""
    halves = bytearray(axis.width * 2)
    for span in spans:
        _paint_half_cells(halves, axis.halves(span.begin_ns, span.end_ns), _tone_of_span(span))
    for span in blocked:
        if span.exposed_ns:
            _paint_half_cells(halves, axis.halves(*exposed_part(span)), "exposed")
    return style_half_cells(halves, NOTHING[letters], letters=letters)


def _tone_of_span(span: LaneSpan) -> str:
    if span.stream is Stream.COMMUNICATION:
        return "hidden"
    return span.name if span.name in NUMBERS else "other"


def _paint_half_cells(halves: bytearray, span: tuple[int, int], tone: str) -> None:
    start, stop = span
    halves[start:stop] = bytes((NUMBERS[tone],)) * (stop - start)


def draw_span_pointer(span: LaneSpan | None, axis: Axis) -> Line:
    """Returns a line with a mark over *span*."""
    start, stop = axis.halves(span.begin_ns, span.end_ns) if span is not None else (0, 0)
    if stop <= start:
        return [(" " * axis.width, "")]
    first_cell, last_cell = start // 2, max(start // 2 + 1, (stop + 1) // 2)
    mark = "▼" if last_cell - first_cell < 3 else "▼" + "─" * (last_cell - first_cell - 2) + "▼"
    return [(" " * first_cell, ""), (fit(mark, axis.width - first_cell), "accent")]
