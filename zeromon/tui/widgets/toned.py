"""From toned text to the strips that Textual draws."""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.strip import Strip

from zeromon.tui.line import Line, cells, cut
from zeromon.tui.tones import ground_of, style


def ground(app: App[int]) -> str:
    """What tones must be legible on in *app*."""
    return ground_of(app.current_theme, no_color=app.no_color)


class Ink(dict[str, Style]):
    """How tones look over one style; each is looked up once."""

    def __init__(self, base: Style, on: str) -> None:
        super().__init__()
        self._base, self._on = base, on

    def __missing__(self, tone: str) -> Style:
        self[tone] = found = self._base + style(tone, self._on)
        return found

    def strip(self, line: Line, width: int) -> Strip:
        """*line* in exactly *width* cells. Every segment has a style: filters of Textual need one."""
        room = width - sum([cells(text) for text, _ in line])
        if room < 0:
            line, room = cut(line, width), 0
        segments = [Segment(text, self[tone]) for text, tone in line]
        if room:
            segments.append(Segment(" " * room, self._base))
        return Strip(segments, width)


@lru_cache(64)
def ink(base: Style, on: str) -> Ink:
    """The one of *base* on a ground."""
    return Ink(base, on)
