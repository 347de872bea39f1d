"""Draws bars, stacked and against a limit, and turns half cells into text. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from zeromon.readout.breakdown import PARTS
from zeromon.tui.line import Line, Span, merge_equal_tones
from zeromon.tui.styles import HEAT_LEVELS

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
    return style_half_cells(_halves_of_sizes(sizes, scale, width * 2), (" ", ""), letters=letters)


def _halves_of_sizes(sizes: Sequence[Part], scale: float, half_cells: int) -> bytearray:
    """The parts as half cells. Rounds the ends, not the sizes, so that the sum is exact."""
    halves = bytearray()
    position = 0.0
    for tone, size in sizes:
        position += max(0.0, size)
        upto = round(position / scale * half_cells) if scale > 0 else 0
        halves += bytes((NUMBERS[tone],)) * (min(half_cells, upto) - len(halves))
    return halves.ljust(half_cells, b"\0")


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


# ---- draws a heat map: one cell per rank, or per several ranks with the worst value --------------

_SHADES = "·▁▂▃▄▅▆█"
"""The shades without colour."""
assert len(_SHADES) == HEAT_LEVELS


@dataclass(frozen=True, slots=True)
class Mesh:
    """The layout of ranks in cells."""

    columns: int
    cell: int
    """Characters in a cell."""
    each: int
    """Ranks in a cell."""

    def place(self, index: int) -> tuple[int, int]:
        """Returns the row and the column of the *index*-th rank."""
        return divmod(index // self.each, self.columns)

    def index(self, x: int, y: int) -> int:
        """Returns the index of the first rank in the cell at character (x, y)."""
        return (y * self.columns + x // self.cell) * self.each


def fit_mesh_cells(count: int, width: int, height: int) -> Mesh:
    """Returns the widest cells with which *count* ranks fit; with too many, ranks share a cell."""
    for cell in (4, 3, 2):
        columns = _round_to_eights(width // cell)
        if columns * height >= count:
            return Mesh(columns, cell, 1)
    columns = _round_to_eights(max(1, width))
    return Mesh(columns, 1, max(1, -(-count // max(1, columns * height))))


def _round_to_eights(columns: int) -> int:
    """Rounds down to a multiple of eight ranks, so that nodes of eight ranks align with rows."""
    return max(1, columns // 8 * 8 if columns >= 8 else columns)


def heat_levels(values: Sequence[float | None], low: float, high: float) -> bytes:
    """Returns the level of each value, from 1; 0 for None."""
    wide = high - low if high > low else 1.0
    top_level = HEAT_LEVELS - 1
    return bytes([
        0 if value is None else 1 + min(top_level, max(0, int((value - low) / wide * HEAT_LEVELS)))
        for value in values
    ])  # fmt: skip


def draw_heat_map(
    values: Sequence[float | None],
    span: tuple[float, float],
    laid: Mesh,
    chosen: int = -1,
    *,
    letters: bool = False,
) -> list[Line]:
    """Returns the rows of the map of *values*; marks the cell of the *chosen* rank."""
    shades = heat_levels(values, *span)
    if laid.each > 1:
        cell_starts = range(0, len(shades), laid.each)
        shades = bytes([max(shades[at : at + laid.each]) for at in cell_starts])
    marked = chosen // laid.each if chosen >= 0 else -1
    rows = []
    for row_start in range(0, len(shades), laid.columns):
        row, at = shades[row_start : row_start + laid.columns], marked - row_start
        if 0 <= at < len(row):
            head, tail = (_row_line(side, laid.cell, letters) for side in (row[:at], row[at + 1 :]))
            rows.append([*head, *_chosen_cell(row[at] - 1, laid.cell, letters), *tail])
        else:
            rows.append(_row_line(row, laid.cell, letters))
    return rows


def _row_line(shades: bytes, size: int, letters: bool) -> Line:
    """Returns the cells of a row; each byte of *shades* is a level plus one, 0 for None."""
    spans: Line = []
    for run in ALIKE.finditer(shades):
        shade = run[1][0] - 1
        sign = _sign_of_shade(shade, letters)
        cell = sign if size == 1 else sign * (size - 1) + " "
        spans.append((cell * len(run[0]), _tone_of_shade(shade)))
    return spans


def _sign_of_shade(shade: int, letters: bool) -> str:
    return "?" if shade < 0 else _SHADES[shade] if letters else "█"


def _tone_of_shade(shade: int) -> str:
    return f"heat{shade}" if shade >= 0 else "faint"


def _chosen_cell(shade: int, size: int, letters: bool) -> Line:
    """The cell of the chosen rank, with its level."""
    sign = "◆" if size == 1 else _sign_of_shade(shade, letters) * max(1, size - 2)
    open_sign, close_sign = "[" * (size > 2), "]" * (size > 1)
    return [(open_sign, "bold"), (sign, _tone_of_shade(shade)), (close_sign, "bold")]


def draw_heat_scale(low: str, high: str, *, letters: bool = False) -> Line:
    """Returns the legend of the levels."""
    steps: Line = [(_sign_of_shade(shade, letters), f"heat{shade}") for shade in range(HEAT_LEVELS)]
    return [(f"{low} ", "dim"), *steps, (f" {high}", "dim")]
