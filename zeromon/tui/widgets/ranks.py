"""The table of ranks: only what is on screen is drawn, so a thousand ranks cost as ten do."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from zeromon.snapshot import RankSnapshot
from zeromon.tui.renderables import rank_header, rank_line


class Ranks(ScrollView, can_focus=True):
    """One line a rank, under a header that stays."""

    DEFAULT_CSS = """
    Ranks { height: 1fr; min-height: 3; }
    Ranks:focus { background-tint: $foreground 2%; }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._ranks: tuple[RankSnapshot, ...] = ()

    def show(self, ranks: tuple[RankSnapshot, ...]) -> None:
        """Shows *ranks* in this order."""
        self._ranks = ranks
        self.virtual_size = Size(self.size.width, len(ranks) + 1)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """The header at the top, else the rank that is scrolled there."""
        width = self.size.width
        # a style on every segment: the monochrome filter of NO_COLOR needs one
        base: Style = self.rich_style
        if y == 0:
            text = rank_header(width)
        else:
            index = y - 1 + int(self.scroll_offset.y)
            if index >= len(self._ranks):
                return Strip([Segment(" " * width, base)], width)
            text = rank_line(self._ranks[index], width)
        segments = [
            Segment(part.text, base + part.style if part.style else base)
            for part in text.render(self.app.console)
            if part.text != "\n"
        ]
        return Strip(segments).adjust_cell_length(width, base)
