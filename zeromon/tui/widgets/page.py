"""A text that scrolls; only the lines on the screen are turned into strips."""

from collections.abc import Callable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from zeromon.tui.line import Line
from zeromon.tui.widgets.styled import app_background, palette

Write = Callable[[int], list[Line]]
"""A function of the width that returns lines."""


class Page(ScrollView, can_focus=True):
    """A text that is laid out for its width; the arrows, page keys and the wheel scroll it."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Scroll down", show=False),
        Binding("k", "scroll_up", "Scroll up", show=False),
    ]

    def __init__(self, title: str = "", *, id: str | None = None) -> None:
        super().__init__(id=id, classes="box")
        if title:
            self.border_title = title
        self._write: Write = lambda _width: []
        self._lines: list[Line] = []
        self._follows = False
        self._end = 0
        self._goes_to_end = False

    def show(self, write: Write, *, follow: bool = False) -> None:
        """Shows the lines of *write*; *follow*: keeps the end in view when it is in view."""
        self._write, self._follows = write, follow
        self._lay()

    def on_resize(self) -> None:
        """Lays the lines out for the new width."""
        self._lay()

    def _lay(self) -> None:
        width = self.scrollable_content_region.width
        if width <= 0:
            return
        # the end may have moved with the size
        at_end = self._goes_to_end or self.scroll_offset.y >= min(self._end, self.max_scroll_y)
        self._lines = self._write(width)
        self.virtual_size = Size(width, len(self._lines))
        self._end = self.max_scroll_y
        if self._follows and at_end:
            self._goes_to_end = True  # once it is laid out; more lines may come before
            self.scroll_end(animate=False)
            self.call_after_refresh(self._is_there)
        self.refresh()

    def _is_there(self) -> None:
        self._goes_to_end = False

    @property
    def text(self) -> list[Line]:
        """All lines of the text."""
        return self._lines

    def render_line(self, y: int) -> Strip:
        """The line that is scrolled to *y*."""
        at = y + self.scroll_offset.y
        line = self._lines[at] if at < len(self._lines) else []
        width = self.scrollable_content_region.width
        return palette(self.rich_style, app_background(self.app)).strip(line, width)
