"""Styled text as the strips that Textual draws."""

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.strip import Strip

from zeromon.tui.line import Line, cells, cut
from zeromon.tui.styles import background_of, style


def app_background(app: App[int]) -> str:
    """The kind of background that *app* has now."""
    return background_of(app.current_theme, no_color=app.no_color)


class Palette(dict[str, Style]):
    """The styles over one base style; looks each up once."""

    def __init__(self, base: Style, on: str) -> None:
        super().__init__()
        self._base, self._on = base, on

    def __missing__(self, tone: str) -> Style:
        self[tone] = made = self._base + style(tone, self._on)
        return made

    def strip(self, line: Line, width: int) -> Strip:
        """*line* in exactly *width* cells. Every segment has a style, which filters of Textual need."""
        room = width - sum([cells(text) for text, _ in line])
        if room < 0:
            line, room = cut(line, width), 0
        segments = [Segment(text, self[tone]) for text, tone in line]
        if room:
            segments.append(Segment(" " * room, self._base))
        return Strip(segments, width)


@lru_cache(64)
def palette(base: Style, on: str) -> Palette:
    """The palette over *base* on a kind of background."""
    return Palette(base, on)
