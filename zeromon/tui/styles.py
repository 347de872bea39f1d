"""The colours of tones: on dark and light backgrounds, in 16 colours, and without colour. Pure.

The palette is Okabe and Ito's, which colour-blind readers can distinguish, blue to orange in maps.
A part of a step has the colour of its kind: compute is blue, communication violet, waiting orange, the
script's own code grey. No meaning depends on red against green; what is severe is also bold, and has a
mark.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from rich.style import Style
from textual.theme import Theme

_COLOURS: Mapping[str, Any] = json.loads(files(__package__).joinpath("colours.json").read_text())
"""The colours of each tone on the three backgrounds, those of the shades of a map, and the themes."""
_PALETTES = {
    background: {tone: colours[number] for tone, colours in _COLOURS["tones"].items()}
    for number, background in enumerate(("dark", "light", "sixteen"))
}
_SHADES: Mapping[str, Sequence[str]] = _COLOURS["shades"]
"""Text and cell of each shade around the median; orange is high, as waiting is."""
_PLAIN = {
    "dim": Style(), "faint": Style(dim=True), "accent": Style(bold=True), "good": Style(),
    "warn": Style(bold=True), "bad": Style(bold=True, reverse=True),
    "blamed": Style(bold=True, reverse=True),
    "added": Style(bold=True),
    "removed": Style(dim=True), "capacity": Style(dim=True), "forecast": Style(dim=True),
}  # fmt: skip
_ATTRIBUTES = {
    "bold": Style(bold=True), "title": Style(bold=True), "cursor": Style(reverse=True),
    "badge": Style(bold=True, reverse=True), "": Style(),
}  # fmt: skip
_BOLD_TOO = frozenset(("bad", "accent"))


@lru_cache(1024)
def style_of_tone(tone: str, background: str) -> Style:
    """The style of *tone* on a ``dark`` or ``light`` background, in ``sixteen`` colours or ``none``."""
    if tone in _ATTRIBUTES:
        return _ATTRIBUTES[tone]
    name, _, back = tone.partition("|")
    if background == "none":
        return _PLAIN.get(name, Style())
    if name.startswith("heat"):
        ink, cell = _SHADES[background][int(name[4:])].split(" on ")
        return Style(color=ink, bgcolor=cell)
    if name == "blamed":
        return Style(
            color="bright_white", bgcolor="red" if background == "sixteen" else "#c62828", bold=True
        )
    palette = _PALETTES[background]
    bold = True if name in _BOLD_TOO else None
    return Style(color=palette.get(name), bgcolor=palette.get(back), bold=bold)


def background_of_theme(theme: Theme, *, no_color: bool) -> str:
    """The kind of background that *theme* has."""
    if no_color:
        return "none"
    if theme.ansi:
        return "sixteen"
    return "dark" if theme.dark else "light"


THEMES = tuple(Theme(**theme) for theme in _COLOURS["themes"])
