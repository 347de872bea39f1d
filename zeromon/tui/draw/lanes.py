"""Draws lanes over time: the last steps of each rank. Pure.

Steps and the gaps between them have their true position and length. Within a step only sums by phase are
known, not times: a lane draws them as shares, in the order of a step: what is exposed ends its phase.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from zeromon.readout.breakdown import PHASES, RECORDED
from zeromon.readout.text import exposed_part
from zeromon.snapshot import StepSummary
from zeromon.snapshot.lanes import LaneSpan, Stream
from zeromon.tui.draw.bars import NUMBERS, styled
from zeromon.tui.line import Line, Span, cells, fit
from zeromon.units import human_seconds

_ORDER = ("data_wait", *(phase for phase in PHASES if phase != "data_wait"))
NOTHING: tuple[Span, Span] = (("·", "faint"), (" ", ""))
"""The cell where there is no step, with colour and without."""


def lane(
    recent: Sequence[StepSummary], first_ns: int, last_ns: int, width: int, *, letters: bool = False
) -> Line:
    """Returns the steps of one rank between two times, divided into parts."""
    halves = bytearray(width * 2)
    for step in _visible(recent, first_ns, last_ns):
        parts: list[tuple[str, int]] = []
        for phase, own, exposed in _phases(step):
            parts += [(phase, own), ("exposed", exposed)]
        _fill(halves, step, parts, first_ns, last_ns)
    return styled(halves, NOTHING[letters], letters=letters)


def communication(
    recent: Sequence[StepSummary], first_ns: int, last_ns: int, width: int, *, letters: bool = False
) -> Line:
    """Returns the communication of each step: the exposed below its phase, the hidden before it.

    The hidden is known of a whole step alone: it is drawn where some is exposed, else at the start.
    """
    halves = bytearray(width * 2)
    for step in _visible(recent, first_ns, last_ns):
        _fill(halves, step, _communication(step), first_ns, last_ns)
    return styled(halves, NOTHING[letters], letters=letters)


def _phases(step: StepSummary) -> Iterator[tuple[str, int, int]]:
    """(phase, its nanoseconds without what is exposed, what is exposed), in the order of a step."""
    spent = dict(zip(RECORDED, step.phase_ns, strict=False))
    exposed: dict[str, int] = {}
    if step.timed:
        exposed = dict(zip(RECORDED, step.phase_exposed_ns, strict=False))
    for phase in _ORDER:
        whole = spent.get(phase, 0)
        waits = min(whole, exposed.get(phase, 0))
        yield phase, whole - waits, waits


def _communication(step: StepSummary) -> Iterator[tuple[str, int]]:
    if not step.timed:
        yield "untimed", step.end_ns - step.start_ns
        return
    hidden, phases = max(0, step.communication_ns - step.exposed_ns), list(_phases(step))
    whole = sum(exposed for _, _, exposed in phases)
    if not whole:
        yield from (("hidden", hidden), ("exposed", step.exposed_ns))
        return
    for _, own, exposed in phases:
        before = min(own, hidden * exposed // whole)
        yield from (("", own - before), ("hidden", before), ("exposed", exposed))


def _visible(recent: Sequence[StepSummary], first_ns: int, last_ns: int) -> Iterator[StepSummary]:
    for at in range(bisect_right(recent, first_ns, key=lambda step: step.end_ns), len(recent)):
        if recent[at].start_ns >= last_ns:
            return
        yield recent[at]


def _fill(
    halves: bytearray,
    step: StepSummary,
    parts: Iterable[tuple[str, int]],
    first_ns: int,
    last_ns: int,
) -> None:
    """Draws the parts of a step, clipped to the lane."""
    each = len(halves) / max(1, last_ns - first_ns)
    at = step.start_ns
    end = max(0, round((at - first_ns) * each))
    for name, spent in parts:
        if spent <= 0:
            continue
        begin, at = end, min(step.end_ns, at + spent)
        end = max(0, min(len(halves), round((at - first_ns) * each)))
        if name and end > begin:
            halves[begin:end] = bytes((NUMBERS[name],)) * (end - begin)


def ago_of(now_ns: int) -> Callable[[float], str]:
    """Labels of a ruler: how long before *now_ns* a moment was."""

    def text(moment: float) -> str:
        ago = (now_ns - moment) / 1e9
        return f"-{human_seconds(ago)}" if ago > 1e-4 else "now"

    return text


def ruler(first_ns: int, last_ns: int, width: int, text_of: Callable[[float], str]) -> Line:
    """Returns five labels, each the text of the moment at its place."""
    body = [" "] * width
    for part in range(5):
        at = round(part / 4 * (width - 1))
        text = text_of(first_ns + (last_ns - first_ns) * part / 4)
        begin = min(max(0, at - (cells(text) if part == 4 else 0)), max(0, width - cells(text)))
        if all(sign == " " for sign in body[max(0, begin - 1) : begin + cells(text) + 1]):
            body[begin : begin + cells(text)] = text
    return [("".join(body)[:width], "dim")]


def numbers(steps: Iterable[tuple[int, int, int]], first_ns: int, last_ns: int, width: int) -> Line:
    """Returns the numbers of (number, begin, end) at their beginnings, where they fit."""
    body = [" "] * width
    for number, begin_ns, end_ns in steps:
        if end_ns <= first_ns or begin_ns >= last_ns:
            continue
        at = round((begin_ns - first_ns) / max(1, last_ns - first_ns) * width)
        text = f"▏{number}"
        if (
            at >= 0
            and at + len(text) < width
            and all(s == " " for s in body[max(0, at - 1) : at + len(text) + 1])
        ):
            body[at : at + len(text)] = text
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
        most = 2 * self.width
        each = most / max(1, self.last_ns - self.first_ns)
        begin = min(most - 1, max(0, round((begin_ns - self.first_ns) * each)))
        return begin, min(most, max(begin + 1, round((end_ns - self.first_ns) * each)))


def span_lane(
    spans: Iterable[LaneSpan], blocked: Iterable[LaneSpan], axis: Axis, *, letters: bool = False
) -> Line:
    """Returns *spans* on one lane, and over them the exposed part of *blocked*."""
    halves = bytearray(axis.width * 2)
    for span in spans:
        _paint(halves, axis.halves(span.begin_ns, span.end_ns), _tone(span))
    for span in blocked:
        if span.exposed_ns:
            _paint(halves, axis.halves(*exposed_part(span)), "exposed")
    return styled(halves, NOTHING[letters], letters=letters)


def _tone(span: LaneSpan) -> str:
    if span.stream is Stream.COMMUNICATION:
        return "hidden"
    return span.name if span.name in NUMBERS else "other"


def _paint(halves: bytearray, place: tuple[int, int], tone: str) -> None:
    begin, end = place
    halves[begin:end] = bytes((NUMBERS[tone],)) * (end - begin)


def pointer(span: LaneSpan | None, axis: Axis) -> Line:
    """Returns a line with a mark over *span*."""
    begin, end = axis.halves(span.begin_ns, span.end_ns) if span is not None else (0, 0)
    if end <= begin:
        return [(" " * axis.width, "")]
    first, last = begin // 2, max(begin // 2 + 1, (end + 1) // 2)
    mark = "▼" if last - first < 3 else "▼" + "─" * (last - first - 2) + "▼"
    return [(" " * first, ""), (fit(mark, axis.width - first), "accent")]
