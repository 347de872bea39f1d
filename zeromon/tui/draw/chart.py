"""Braille lines over steps, with levels, a forecast and marks. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zeromon.tui.draw.bars import ALIKE
from zeromon.tui.line import Line, cells, fit, merged, padded

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = " " + "".join(chr(0x2800 + dots) for dots in range(1, 256))
_LABEL = 7
_LEAST_COLUMNS, _LEAST_ROWS = 6, 3

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart: (step, value), in the order of steps."""

    name: str
    tone: str
    points: Points
    gap: int = 0
    """Dots on, then dots off; 0: a solid line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A chart's content."""

    curves: tuple[Curve, ...]
    x: tuple[float, float]
    y: tuple[float, float]
    axis: Callable[[float], str]
    """The text of a value of the y axis, at most six cells."""
    unit: str = ""
    ticks: tuple[float, ...] = ()
    """The labelled values of the y axis; its ends, when empty."""
    levels: tuple[tuple[float, str], ...] = ()
    """Horizontal lines: value and style."""
    marks: tuple[float, ...] = ()
    """Steps that the user marked."""
    foot: tuple[str, str] = ("", "")
    """The texts below the ends of the x axis."""


def chart(plot: Plot, width: int, height: int) -> list[Line]:
    """Returns *plot* in *width* x *height* cells, the x axis last; [] where it does not fit."""
    columns, rows = width - _LABEL, height - 1
    if columns < _LEAST_COLUMNS or rows < _LEAST_ROWS:
        return []
    canvas = _Canvas(plot, columns, rows)
    for value, tone in plot.levels:
        canvas.across(value, tone)
    for curve in reversed(plot.curves):  # draw the first curve last, on top
        canvas.draw(curve)
    labels = _labels(plot, canvas)
    lines = [[(labels[row], "dim"), *canvas.spans(row)] for row in range(rows)]
    return [*lines, _foot(plot, columns)]


class _Canvas:
    """The dots of a chart, two by four per cell; a cell has the style of its last drawn dot."""

    def __init__(self, plot: Plot, columns: int, rows: int) -> None:
        self._plot = plot
        self.columns, self.rows = columns, rows
        self._dots = [bytearray(columns) for _ in range(rows)]
        self._tones = [bytearray(columns) for _ in range(rows)]
        self._names = [""]

    def row(self, value: float) -> int:
        """Returns the row of dots of a value."""
        low, high = self._plot.y
        share = (value - low) / ((high - low) or 1)
        return round((1 - min(1.0, max(0.0, share))) * (self.rows * 4 - 1))

    def across(self, value: float, tone: str) -> None:
        """Draws a dashed horizontal line at *value*."""
        style, row = self._style_index(tone), self.row(value)
        for x in range(self.columns * 2):
            if x % 6 < 3:
                self._dot(x, row, row, style)

    def draw(self, curve: Curve) -> None:
        """Draws a line through the points of *curve*."""
        style, gap = self._style_index(curve.tone), curve.gap
        for x, low, high in _trace(self._places(curve.points)):
            if not gap or x // gap % 2 == 0:
                self._dot(x, low, high, style)

    def _style_index(self, tone: str) -> int:
        self._names.append(tone)
        return len(self._names) - 1

    def _places(self, points: Points) -> Iterator[tuple[int, int]]:
        """Yields the column and the row of dots of each point."""
        (left, right), (low, high) = self._plot.x, self._plot.y
        wide, tall = (right - left) or 1, (high - low) or 1
        last_column, last_row = self.columns * 2 - 1, self.rows * 4 - 1
        for x, value in points:
            share = (value - low) / tall
            share = 0.0 if share < 0 else 1.0 if share > 1 else share
            yield round((x - left) / wide * last_column), round((1 - share) * last_row)

    def _dot(self, x: int, low: int, high: int, style: int) -> None:
        """Sets the dots of column *x* from *low* to *high*."""
        if not 0 <= x < self.columns * 2:
            return
        column, side = x >> 1, x & 1
        for y in range(low, high + 1):
            self._dots[y >> 2][column] |= _DOTS[y & 3][side]
            self._tones[y >> 2][column] = style

    def spans(self, row: int) -> Line:
        """Returns the styled text of a row of cells."""
        text = self._dots[row].decode("latin-1").translate(_BRAILLE)
        names = self._names
        return [
            (text[slice(*run.span())], names[run[1][0]]) for run in ALIKE.finditer(self._tones[row])
        ]


def _trace(places: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yields (column, lowest row, highest row) of a line through *places*."""
    before = next(places, None)
    if before is None:
        return
    x, y = before
    yield x, y, y
    for column, row in places:
        wide = column - x
        if wide <= 1:  # neighbouring columns, the common case: nothing to interpolate
            yield column, min(row, y), max(row, y)
        else:
            last = y
            for step in range(1, wide + 1):
                now = y + round((row - y) * step / wide)
                yield x + step, min(last, now), max(last, now)
                last = now
        x, y = column, row


def _labels(plot: Plot, canvas: _Canvas) -> list[str]:
    """Returns a label for each row, blank for most."""
    labels = [" " * _LABEL] * canvas.rows
    for value in plot.ticks or (plot.y[0], plot.y[1]):
        row = canvas.row(value) >> 2
        if not labels[row].strip():
            labels[row] = f"{plot.axis(value):>6} "
    return labels


def _foot(plot: Plot, columns: int) -> Line:
    first, last = plot.foot
    gap = columns - cells(first) - cells(last)
    if gap < 1:
        first, gap = "", max(0, columns - cells(last))
    body = list(first + " " * gap + last)
    free = range(len(first), min(columns, len(first) + gap))
    marked = {
        min(
            free, key=lambda near: abs(near - column), default=column
        )  # beside a number, not over it
        for mark in plot.marks
        if plot.x[0] <= mark <= plot.x[1]
        for column in [round((mark - plot.x[0]) / ((plot.x[1] - plot.x[0]) or 1) * (columns - 1))]
    }
    line: Line = [(fit(plot.unit, _LABEL - 1, right=True) + " ", "dim")]
    for at, sign in enumerate(body[:columns]):
        line.append(("▲", "warn") if at in marked else (sign, "dim"))
    return merged(line)


def charted(plot: Plot) -> Callable[[int, int], list[Line]]:
    """Returns the function (width, height) -> legend of *plot* above its chart."""
    return lambda width, height: [legend(plot, width), *chart(plot, width, height - 1)]


_SIGNS = {0: "━ ", 1: "┉ ", 2: "╌ ", 4: "╍ ", 8: "╺ "}


def legend(plot: Plot, width: int) -> Line:
    """Returns the names and newest values of the curves, in their styles."""
    line: Line = []
    unit = f" {plot.unit}" if plot.unit else ""
    for curve in plot.curves:
        newest = f" {plot.axis(curve.points[-1][1]).strip()}{unit}" if curve.points else " -"
        text = curve.name + ("" if curve.tone == "forecast" else newest)
        line += [(_SIGNS.get(curve.gap, "━ "), curve.tone), (text + "  ", "")]
    return padded(line, width)
