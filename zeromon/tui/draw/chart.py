"""Braille lines over steps, with levels, a forecast and marks. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zeromon.tui.draw.bars import ALIKE
from zeromon.tui.line import Line, cells, fit, merge_equal_tones, pad_line

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = " " + "".join(chr(0x2800 + dots) for dots in range(1, 256))
_LABEL = 7
_MIN_COLUMNS, _MIN_ROWS = 6, 3

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


def draw_chart(plot: Plot, width: int, height: int) -> list[Line]:
    """Returns *plot* in *width* x *height* cells, the x axis last; [] where it does not fit."""
    columns, rows = width - _LABEL, height - 1
    if columns < _MIN_COLUMNS or rows < _MIN_ROWS:
        return []
    canvas = _Canvas(plot, columns, rows)
    for value, tone in plot.levels:
        canvas.across(value, tone)
    for curve in reversed(plot.curves):  # draw the first curve last, on top
        canvas.draw(curve)
    labels = _row_labels(plot, canvas)
    canvas_lines = [[(labels[row], "dim"), *canvas.spans(row)] for row in range(rows)]
    return [*canvas_lines, _draw_foot_line(plot, columns)]


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
        style, row = self._index_of_style(tone), self.row(value)
        for x in range(self.columns * 2):
            if x % 6 < 3:
                self._set_dots(x, row, row, style)

    def draw(self, curve: Curve) -> None:
        """Draws a line through the points of *curve*."""
        style, gap = self._index_of_style(curve.tone), curve.gap
        for x, low, high in _trace_dot_columns(self._places(curve.points)):
            if not gap or x // gap % 2 == 0:
                self._set_dots(x, low, high, style)

    def _index_of_style(self, tone: str) -> int:
        self._names.append(tone)
        return len(self._names) - 1

    def _places(self, points: Points) -> Iterator[tuple[int, int]]:
        """Yields the column and the row of dots of each point."""
        (x_start, x_stop), (low, high) = self._plot.x, self._plot.y
        wide, tall = (x_stop - x_start) or 1, (high - low) or 1
        last_column, last_row = self.columns * 2 - 1, self.rows * 4 - 1
        for x, value in points:
            share = (value - low) / tall
            share = 0.0 if share < 0 else 1.0 if share > 1 else share
            yield round((x - x_start) / wide * last_column), round((1 - share) * last_row)

    def _set_dots(self, x: int, low: int, high: int, style: int) -> None:
        """Sets the dots of column *x* from *low* to *high*."""
        if not 0 <= x < self.columns * 2:
            return
        column, side = x >> 1, x & 1
        for y in range(low, high + 1):
            self._dots[y >> 2][column] |= _DOTS[y & 3][side]
            self._tones[y >> 2][column] = style

    def spans(self, row: int) -> Line:
        """Returns the styled text of a row of cells."""
        dots = self._dots[row].decode("latin-1").translate(_BRAILLE)
        names = self._names
        return [(dots[slice(*run.span())], names[run[1][0]]) for run in ALIKE.finditer(self._tones[row])]


def _trace_dot_columns(dots: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yields (column, lowest row, highest row) of a line through *dots*."""
    first_dot = next(dots, None)
    if first_dot is None:
        return
    x, y = first_dot
    yield x, y, y
    for column, row in dots:
        wide = column - x
        if wide <= 1:  # neighbouring columns, the common case: nothing to interpolate
            yield column, min(row, y), max(row, y)
        else:
            previous_y = y
            for step in range(1, wide + 1):
                next_y = y + round((row - y) * step / wide)
                yield x + step, min(previous_y, next_y), max(previous_y, next_y)
                previous_y = next_y
        x, y = column, row


def _row_labels(plot: Plot, canvas: _Canvas) -> list[str]:
    """Returns a label for each row, blank for most."""
    labels = [" " * _LABEL] * canvas.rows
    for value in plot.ticks or (plot.y[0], plot.y[1]):
        row = canvas.row(value) >> 2
        if not labels[row].strip():
            labels[row] = f"{plot.axis(value):>6} "
    return labels


def _draw_foot_line(plot: Plot, columns: int) -> Line:
    left_text, right_text = plot.foot
    gap = columns - cells(left_text) - cells(right_text)
    if gap < 1:
        left_text, gap = "", max(0, columns - cells(right_text))
    body = list(left_text + " " * gap + right_text)
    free = range(len(left_text), min(columns, len(left_text) + gap))
    marked = {
        min(free, key=lambda cell: abs(cell - column), default=column)  # beside a number, not over it
        for mark in plot.marks
        if plot.x[0] <= mark <= plot.x[1]
        for column in [round((mark - plot.x[0]) / ((plot.x[1] - plot.x[0]) or 1) * (columns - 1))]
    }
    spans: Line = [(fit(plot.unit, _LABEL - 1, right=True) + " ", "dim")]
    for at, sign in enumerate(body[:columns]):
        spans.append(("▲", "warn") if at in marked else (sign, "dim"))
    return merge_equal_tones(spans)


def chart_drawer(plot: Plot) -> Callable[[int, int], list[Line]]:
    """Returns the function (width, height) -> legend of *plot* above its chart."""
    return lambda width, height: [draw_legend(plot, width), *draw_chart(plot, width, height - 1)]


_SIGNS = {0: "━ ", 1: "┉ ", 2: "╌ ", 4: "╍ ", 8: "╺ "}


def draw_legend(plot: Plot, width: int) -> Line:
    """Returns the names and newest values of the curves, in their styles."""
    spans: Line = []
    unit = f" {plot.unit}" if plot.unit else ""
    for curve in plot.curves:
        value_text = f" {plot.axis(curve.points[-1][1]).strip()}{unit}" if curve.points else " -"
        label = curve.name + ("" if curve.tone == "forecast" else value_text)
        spans += [(_SIGNS.get(curve.gap, "━ "), curve.tone), (label + "  ", "")]
    return pad_line(spans, width)
