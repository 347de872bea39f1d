"""A box whose lines are drawn to fit it."""

from collections.abc import Callable
from itertools import groupby, zip_longest

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from zeromon.tui.line import Line
from zeromon.tui.widgets.styled import Palette, app_background, palette

Draw = Callable[[int, int], list[Line]]
"""A function of width and height that returns lines."""


class Panel(Widget):
    """Lines that are made anew when there is something new, or room changes.

    Of a snapshot that comes several times a second most lines are those of the one before: only what has
    changed is drawn.
    """

    ALLOW_SELECT = False

    def __init__(
        self, title: str = "", *, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        if title:
            self.border_title = title
        self._draw: Draw = lambda _width, _height: []
        self._made: tuple[tuple[int, int], list[Line]] | None = None
        self._palette: Palette | None = None

    def show(self, draw: Draw, title: str | None = None) -> None:
        """Shows the lines of *draw*."""
        before = self._made
        self._draw, self._made = draw, None
        if title is not None and title != self.border_title:
            self.border_title = title
        if before is None or before[0] != (self.size.width, self.size.height):
            self.refresh()
        else:
            self.refresh_lines(changed(before[1], self.lines()))

    def refresh_lines(self, rows: list[int]) -> None:
        """Refreshes the rows that differ, and no others."""
        height = self.size.height
        regions = [
            Region(0, first, self.size.width, count)
            for first, count in runs([row for row in rows if row < height])
        ]
        if regions:
            self.refresh(*regions)

    def lines(self) -> list[Line]:
        """The lines that are shown."""
        size = self.size.width, self.size.height
        if self._made is None or self._made[0] != size:
            self._made = size, self._draw(*size)
        return self._made[1]

    def render_lines(self, crop: Region) -> list[Strip]:
        """The strips of *crop*; looks styles up once for all of them."""
        self._palette = None
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """The line at *y*."""
        if self._palette is None:
            self._palette = palette(self.rich_style, app_background(self.app))
        lines = self.lines()
        return self._palette.strip(lines[y] if y < len(lines) else [], self.size.width)


def changed(before: list[Line], after: list[Line]) -> list[int]:
    """The rows in which two lists of lines differ."""
    return [row for row, (old, new) in enumerate(zip_longest(before, after)) if old != new]


def runs(rows: list[int]) -> list[tuple[int, int]]:
    """(first, count) of each range of neighbouring *rows*, which are in ascending order."""
    groups = (list(group) for _, group in groupby(enumerate(rows), lambda pair: pair[1] - pair[0]))
    return [(group[0][1], len(group)) for group in groups]
