"""Draws a heat map: one cell per rank, or per several ranks with the worst value. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from zeromon.tui.draw.bars import ALIKE
from zeromon.tui.line import Line
from zeromon.tui.styles import HEAT_LEVELS

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
