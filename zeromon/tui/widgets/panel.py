"""A box whose lines are drawn to fit it."""

from __future__ import annotations

from collections.abc import Callable

from textual.strip import Strip
from textual.widget import Widget

from zeromon.tui.line import Line
from zeromon.tui.widgets.toned import ground, strip

Draw = Callable[[int, int], list[Line]]
"""Width and height in, lines out."""


class Panel(Widget):
    """Lines that are made anew when there is something new, or room changes."""

    ALLOW_SELECT = False

    def __init__(
        self, title: str = "", *, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        if title:
            self.border_title = title
        self._draw: Draw = lambda _width, _height: []
        self._made: tuple[tuple[int, int], list[Line]] | None = None

    def show(self, draw: Draw, title: str | None = None) -> None:
        """Shows what *draw* makes."""
        self._draw, self._made = draw, None
        if title is not None and title != self.border_title:
            self.border_title = title
        self.refresh()

    def lines(self) -> list[Line]:
        """What is shown now."""
        size = self.size.width, self.size.height
        if self._made is None or self._made[0] != size:
            self._made = size, self._draw(*size)
        return self._made[1]

    def render_line(self, y: int) -> Strip:
        """The line at *y*."""
        lines = self.lines()
        line = lines[y] if y < len(lines) else []
        return strip(line, self.size.width, self.rich_style, ground(self.app))
