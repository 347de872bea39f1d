"""Braille lines over steps, with levels, a forecast and marks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from zeromon.tui.line import Line, Span, cells, padded

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_LABEL = 7
_LEAST_COLUMNS, _LEAST_ROWS = 6, 3

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps, in order of steps."""

    name: str
    tone: str
    points: Points
    gap: int = 0
    """Dots on, dots off; 0: a line without gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What a chart shows."""

    curves: tuple[Curve, ...]
    x: tuple[float, float]
    y: tuple[float, float]
    axis: Callable[[float], str]
    """A value of the y axis in at most six cells."""
    unit: str = ""
    ticks: tuple[float, ...] = ()
    """Where the y axis has labels; the ends, when empty."""
    levels: tuple[tuple[float, str], ...] = ()
    """Values that go across, and their tones."""
    marks: tuple[float, ...] = ()
    """Steps that somebody marked."""
    foot: tuple[str, str] = ("", "")
    """Below the ends of the x axis."""


def chart(plot: Plot, width: int, height: int) -> list[Line]:
    """*plot* in *width* x *height* cells; the last line is the x axis. Empty where that is too small."""
    columns, rows = width - _LABEL, height - 1
    if columns < _LEAST_COLUMNS or rows < _LEAST_ROWS:
        return []
    canvas = _Canvas(columns, rows)
    for value, tone in plot.levels:
        row = canvas.row(value, plot.y)
        for x in range(columns * 2):
            if x % 6 < 3:
                canvas.dot(x, row, row, tone)
    for curve in reversed(plot.curves):  # the first lies on top
        for x, low, high in _trace(curve.points, plot, canvas):
            if not curve.gap or x // curve.gap % 2 == 0:
                canvas.dot(x, low, high, curve.tone)
    labels = _labels(plot, canvas)
    lines = [[(labels[row], "dim"), *canvas.spans(row)] for row in range(rows)]
    return [*lines, _foot(plot, columns)]


class _Canvas:
    """Dots: two by four a cell, each cell in the tone that came last."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._dots = [[0] * columns for _ in range(rows)]
        self._tones = [[""] * columns for _ in range(rows)]

    def row(self, value: float, y: tuple[float, float]) -> int:
        low, high = y
        share = (value - low) / ((high - low) or 1)
        return round((1 - min(1.0, max(0.0, share))) * (self.rows * 4 - 1))

    def column(self, value: float, x: tuple[float, float]) -> int:
        low, high = x
        return round((value - low) / ((high - low) or 1) * (self.columns * 2 - 1))

    def dot(self, x: int, low: int, high: int, tone: str) -> None:
        """Sets the dots of column *x* from *low* to *high*."""
        if not 0 <= x < self.columns * 2:
            return
        column, side = x >> 1, x & 1
        for y in range(low, high + 1):
            self._dots[y >> 2][column] |= _DOTS[y & 3][side]
            self._tones[y >> 2][column] = tone

    def spans(self, row: int) -> Iterator[Span]:
        pairs = zip(self._dots[row], self._tones[row], strict=True)
        for tone, group in groupby(pairs, key=lambda pair: pair[1]):
            yield "".join(chr(0x2800 + dots) if dots else " " for dots, _ in group), tone


def _trace(points: Points, plot: Plot, canvas: _Canvas) -> Iterator[tuple[int, int, int]]:
    """(column, lowest row, highest row) of a line through *points*."""
    before: tuple[int, int] | None = None
    for x, value in points:
        now = canvas.column(x, plot.x), canvas.row(value, plot.y)
        if before is None:
            yield now[0], now[1], now[1]
        elif now[0] == before[0]:
            yield now[0], min(now[1], before[1]), max(now[1], before[1])
        else:
            yield from _between(before, now)
        before = now


def _between(before: tuple[int, int], now: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    wide = now[0] - before[0]
    last = before[1]
    for step in range(1, wide + 1):
        row = before[1] + round((now[1] - before[1]) * step / wide)
        yield before[0] + step, min(last, row), max(last, row)
        last = row


def _labels(plot: Plot, canvas: _Canvas) -> list[str]:
    """One a row: round values, each where it belongs."""
    labels = [" " * _LABEL] * canvas.rows
    for value in plot.ticks or (plot.y[0], plot.y[1]):
        row = canvas.row(value, plot.y) >> 2
        if not labels[row].strip():
            labels[row] = f"{plot.axis(value):>6} "
    return labels


def _foot(plot: Plot, columns: int) -> Line:
    first, last = plot.foot
    gap = columns - cells(first) - cells(last)
    if gap < 1:
        first, gap = "", max(0, columns - cells(last))
    body = list(first + " " * gap + last)
    marked = {
        column
        for mark in plot.marks
        if plot.x[0] <= mark <= plot.x[1]
        for column in [round((mark - plot.x[0]) / ((plot.x[1] - plot.x[0]) or 1) * (columns - 1))]
    }
    line: Line = [(" " * _LABEL, "")]
    for at, sign in enumerate(body[:columns]):
        line.append(("▲", "warn") if at in marked else (sign, "dim"))
    return _joined(line)


def _joined(line: Line) -> Line:
    return [
        ("".join(text for text, _ in group), tone)
        for tone, group in groupby(line, key=lambda span: span[1])
    ]


_SIGNS = {0: "━ ", 1: "┉ ", 2: "╌ ", 4: "╍ ", 8: "╺ "}


def legend(plot: Plot, width: int) -> Line:
    """Names and newest values of the curves, in their tones."""
    line: Line = []
    unit = f" {plot.unit}" if plot.unit else ""
    for curve in plot.curves:
        newest = f" {plot.axis(curve.points[-1][1]).strip()}{unit}" if curve.points else " -"
        said = curve.name + ("" if curve.tone == "forecast" else newest)
        line += [(_SIGNS.get(curve.gap, "━ "), curve.tone), (said + "  ", "")]
    return padded(line, width)
