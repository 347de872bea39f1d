"""Draws spans over time: the phases and the collectives of a rank at their true moments. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from zeromon.readout.lanes import exposed_part
from zeromon.snapshot.lanes import LaneSpan, Stream
from zeromon.tui.draw.bars import NUMBERS, styled
from zeromon.tui.draw.lanes import NOTHING
from zeromon.tui.line import Line, fit


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


def lane(
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
