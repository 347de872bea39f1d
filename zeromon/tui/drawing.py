"""Draws bars, heat maps, charts and lanes as lines of styled text. Pure."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

from zeromon.base.units import human_seconds
from zeromon.readout.breakdown import PARTS, PHASES, RECORDED
from zeromon.readout.figures import Unit
from zeromon.readout.rank_map import RankMap
from zeromon.readout.text import exposed_part
from zeromon.snapshot import StepSummary
from zeromon.snapshot.step import LaneSpan, Stream
from zeromon.tui.line import (
    Line,
    Span,
    cells,
    clean,
    fit,
    line_width,
    merge_equal_tones,
    pad_line,
    text_tail,
)

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


def style_half_cells(halves: bytearray, empty: Span, *, letters: bool = False) -> Line:
    """Returns *halves* as text, two per cell; *empty* is the text of an empty cell.

    *letters*: letters instead of colours.
    """
    spans: Line = []
    for run in _PAIRS_ALIKE.finditer(halves):
        left, right = run[1]
        sign, tone = empty
        if letters:
            sign, tone = (LETTERS[TONES[left or right]], "") if left or right else empty
        elif left or right:
            sign, tone = _span_of_halves(TONES[left], TONES[right])
        spans.append((sign * ((run.end() - run.start()) // 2), tone))
    return merge_equal_tones(spans)


def _span_of_halves(left_tone: str, right_tone: str) -> Span:
    if "untimed" in (left_tone, right_tone):
        return LETTERS["untimed"], "faint"
    if left_tone == right_tone:
        return "█", left_tone
    if not right_tone:
        return "▌", left_tone
    return ("▐", right_tone) if not left_tone else ("▌", f"{left_tone}|{right_tone}")


Part = tuple[str, float]
"""Style and size."""


def stacked_bar(sizes: Sequence[Part], scale: float, width: int, *, letters: bool = False) -> Line:
    """Returns a bar of *sizes* one after the other; *scale* is the size of the full width."""
    half_cells = width * 2
    # Rounds the ends, not the sizes, so that the sum is exact
    halves = bytearray()
    position = 0.0
    for tone, size in sizes:
        position += max(0.0, size)
        upto = round(position / scale * half_cells) if scale > 0 else 0
        halves += bytes((NUMBERS[tone],)) * (min(half_cells, upto) - len(halves))
    return style_half_cells(halves.ljust(half_cells, b"\0"), (" ", ""), letters=letters)


def draw_gauge(
    value: float,
    scale: float,
    width: int,
    tone: str,
    *,
    limit: float | None = None,
    letters: bool = False,
) -> Line:
    """Returns a bar of *value* in a track of *scale*, with a tick at *limit*."""
    filled = round(min(1.0, max(0.0, value / scale)) * width) if scale > 0 else 0
    # A small value must not look like none
    if value > 0 and not filled:
        filled = 1
    body = ["#" if letters else "█"] * filled + ["." if letters else "─"] * (width - filled)
    tones = [tone] * filled + ["faint"] * (width - filled)
    if limit is not None and scale > 0 and width:
        at = max(0, round(min(1.0, limit / scale) * width) - 1)
        body[at], tones[at] = "|" if letters else "┃", "bold"
    return [
        ("".join(sign for sign, _ in group), tone)
        for tone, group in groupby(zip(body, tones, strict=True), key=lambda cell: cell[1])
    ]


# ---- draws a map of ranks: a number or a colour for each, or a colour for the worst of several ---

_SHADES = "▁▂▃▄▅▆█"
"""The shades without colour."""
HEAT_LEVELS = len(_SHADES)
"""An odd number: the median has the middle one."""
_CHUNK = 8
"""Cells beside each other without a gap: the ranks of a usual node."""
_MIN_LONG = 100
"""From here on numbers have no decimal place."""
_MAX_NAME = 12


@dataclass(frozen=True, slots=True)
class Mesh:
    """The layout of cells in chunks, and of chunks beside and below each other."""

    chunks: Sequence[range] = ()
    """The indexes of the ranks of each."""
    across: int = 1
    cell: int = 1
    """Characters in a cell."""
    ranks_per_cell: int = 1
    """Ranks in a cell."""
    numbers: Sequence[str] = ()
    """The number of each rank; () for blocks without numbers."""
    headings: Sequence[str] = ()
    """The text before each chunk."""

    @property
    def heading(self) -> int:
        """Characters before the first cell of a chunk."""
        return 1 + max(map(cells, self.headings), default=-1)

    @property
    def rows(self) -> int:
        """The number of lines."""
        return -(-len(self.chunks) // self.across)

    def place(self, index: int) -> tuple[int, int]:
        """Returns the line and the first character of the cell of the *index*-th rank."""
        at = next(n for n, chunk in enumerate(self.chunks) if index in chunk)
        row, column = divmod(at, self.across)
        inside = (index - self.chunks[at].start) // self.ranks_per_cell * self.cell
        return row, column * self.chunk_width + self.heading + inside

    def index(self, x: int, y: int) -> int | None:
        """Returns the index of the first rank in the cell at character (x, y); None between cells."""
        column, inside = divmod(x, self.chunk_width)
        at = y * self.across + column
        if column >= self.across or at >= len(self.chunks) or inside < self.heading:
            return None
        offset = (inside - self.heading) // self.cell * self.ranks_per_cell
        return self.chunks[at][offset] if offset < len(self.chunks[at]) else None

    @property
    def chunk_width(self) -> int:
        """Characters of a chunk and the gap behind it."""
        return self.heading + _CHUNK * self.cell + 1


def fit_mesh_cells(
    ranks_map: RankMap, unit: Unit, width: int, max_rows: int, max_block_rows: int
) -> Mesh:
    """Returns the widest cells that fit: with numbers, else blocks of one rank or more."""
    chunks: list[range] = []
    labels, named, start = [], [], 0
    for name, row in ranks_map.by_node.items():
        for at in range(0, len(row), _CHUNK):
            chunks.append(range(start + at, start + min(len(row), at + _CHUNK)))
            labels.append(_short_name(row[at].name.removeprefix("rank ")))
            shows_name = not at and len(ranks_map.by_node) > 1
            named.append(f"{_short_name(name)} {labels[-1]}" if shows_name else labels[-1])
        start += len(row)
    values = [unit.scaled(cell.value) for cell in ranks_map.cells]
    # One decimal place for all or for none, so that they can be compared
    decimals = int(max((abs(value) for value in values if value is not None), default=0) < _MIN_LONG)
    numbers = ["n/a" if value is None else f"{value:.{decimals}f}" for value in values]
    for headings, gap in product((named, labels), (2, 1)):
        mesh = Mesh(chunks, 1, max(map(cells, numbers), default=0) + gap, 1, numbers, headings)
        across = (width + 1) // mesh.chunk_width
        if across and -(-len(chunks) // across) <= max_rows:
            return replace(mesh, across=across)
    for ranks_per_cell, size in product(range(1, start + 1), (2, 1)):
        blocks = [
            range(at, min(start, at + _CHUNK * ranks_per_cell))
            for at in range(0, start, _CHUNK * ranks_per_cell)
        ]
        mesh = Mesh(blocks, max(1, (width + 1) // (_CHUNK * size + 1)), size, ranks_per_cell)
        if mesh.rows <= max(1, max_block_rows) and (size == 1 or mesh.chunk_width <= width + 1):
            return mesh
    return Mesh()


def _short_name(node: str) -> str:
    return text_tail(clean(node), _MAX_NAME)


def draw_heat_map(
    ranks_map: RankMap, mesh: Mesh, chosen: int = -1, *, letters: bool = False
) -> list[Line]:
    """Returns the lines of the map; marks the *chosen* rank and those that are blamed."""
    lines: list[Line] = []
    drawn = ranks_map.cells
    for top in range(0, len(mesh.chunks), mesh.across):
        spans: Line = []
        for number, chunk in enumerate(mesh.chunks[top : top + mesh.across], top):
            if mesh.numbers:
                spans.append((fit(mesh.headings[number], mesh.heading - 1, right=True) + " ", "dim"))
            for at in range(chunk.start, chunk.stop, mesh.ranks_per_cell):
                group = drawn[at : min(at + mesh.ranks_per_cell, chunk.stop)]
                is_blamed = any(cell.is_blamed for cell in group)
                mark = "✖" if is_blamed else "▸" if at <= chosen < at + len(group) else ""
                shade = max(ranks_map.shade(cell.value, HEAT_LEVELS) for cell in group)
                sign, tone = draw_swatch(shade, letters=letters)
                if mesh.numbers:
                    sign = mark.ljust(1) + fit(mesh.numbers[at], mesh.cell - 1, right=True)
                else:
                    sign = (mark or sign[0]) + sign[0] * (mesh.cell - 1)
                spans.append((sign, "blamed" if is_blamed else tone))
            spans.append((" " * (1 + (_CHUNK - -(-len(chunk) // mesh.ranks_per_cell)) * mesh.cell), ""))
        lines.append(merge_equal_tones(spans[:-1]))
    return lines


def draw_swatch(shade: int, *, letters: bool = False) -> Span:
    """Returns the sign of a shade for a legend; "?" where it is -1, unknown."""
    return ("??", "faint") if shade < 0 else (2 * (_SHADES[shade] if letters else " "), f"heat{shade}")


# ---- draws lanes over time: the last steps of each rank ------------------------------------------

# Steps and the gaps between them have their true position and length. Within a step only sums by phase
# are known, not times: a lane draws them as shares, in the order of a step: what is exposed ends its
# phase.

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


# ---- braille lines over steps, with levels, a forecast and marks ---------------------------------

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
# An empty cell is a blank, which rstrip removes, and not U+2800
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
    labels = [" " * _LABEL] * canvas.rows
    for value in plot.ticks or (plot.y[0], plot.y[1]):
        row = canvas.row(value) >> 2
        if not labels[row].strip():
            labels[row] = f"{plot.axis(value):>6} "
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
        for x, low, high in _trace_dot_columns(self._point_places(curve.points)):
            if not gap or x // gap % 2 == 0:
                self._set_dots(x, low, high, style)

    def _index_of_style(self, tone: str) -> int:
        self._names.append(tone)
        return len(self._names) - 1

    def _point_places(self, points: Points) -> Iterator[tuple[int, int]]:
        (x_start, x_stop), (low, high) = self._plot.x, self._plot.y
        wide, tall = (x_stop - x_start) or 1, (high - low) or 1
        last_column, last_row = self.columns * 2 - 1, self.rows * 4 - 1
        for x, value in points:
            share = (value - low) / tall
            share = 0.0 if share < 0 else 1.0 if share > 1 else share
            yield round((x - x_start) / wide * last_column), round((1 - share) * last_row)

    def _set_dots(self, x: int, low: int, high: int, style: int) -> None:
        if not 0 <= x < self.columns * 2:
            return
        column, side = x >> 1, x & 1
        for y in range(low, high + 1):
            self._dots[y >> 2][column] |= _DOTS[y & 3][side]
            self._tones[y >> 2][column] = style

    def spans(self, row: int) -> Line:
        """Returns the styled text of a row of cells."""
        # latin-1 makes each byte the character of its number, which translate looks up
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
    """Returns the names and newest values of the curves that fit, in their styles."""
    spans: Line = []
    unit = f" {plot.unit}" if plot.unit else ""
    for curve in plot.curves:
        value_text = f" {plot.axis(curve.points[-1][1]).strip()}{unit}" if curve.points else " -"
        label = curve.name + ("" if curve.tone == "forecast" else value_text)
        gap = "  " * bool(spans)
        if spans and line_width(spans) + cells(gap + label) + 2 > width:
            break
        spans += [(gap, ""), (_SIGNS.get(curve.gap, "━ "), curve.tone), (label, "")]
    return pad_line(spans, width)
