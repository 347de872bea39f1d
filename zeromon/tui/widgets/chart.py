"""A titled braille chart."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widget import Widget

from zeromon.tui.renderables import Series, chart, legend


class Chart(Widget):
    """Lines over the newest steps; scales with its size."""

    DEFAULT_CSS = """
    Chart { border: round $panel-lighten-2; border-title-color: $foreground; height: 1fr; width: 1fr; }
    """

    def __init__(self, title: str, *, id: str) -> None:
        super().__init__(id=id)
        self.border_title = title
        self._series: Sequence[tuple[str, Series]] = ()

    def show(self, series: Sequence[tuple[str, Series]], title: str | None = None) -> None:
        """Draws *series*."""
        if title is not None:
            self.border_title = title
        self._series = series
        self.border_subtitle = legend(series).markup if series else ""
        self.refresh()

    def render(self) -> Text:
        """The chart at the current size."""
        return Text("\n").join(chart(self._series, self.size.width, self.size.height))
