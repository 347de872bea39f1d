"""From toned text to the strips that Textual draws."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.strip import Strip

from zeromon.tui.line import Line, cells, cut, length
from zeromon.tui.tones import ground_of, style


def ground(app: App[int]) -> str:
    """What tones must be legible on in *app*."""
    return ground_of(app.current_theme, no_color=app.no_color)


def strip(line: Line, width: int, base: Style, on: str) -> Strip:
    """*line* in exactly *width* cells. Every segment has a style: filters of Textual need one."""
    line = cut(line, width)
    segments = [Segment(text, base + style(tone, on)) for text, tone in line]
    gap = width - length(line)
    if gap > 0:
        segments.append(Segment(" " * gap, base))
    return Strip(segments, sum(cells(segment.text) for segment in segments))
