"""The colours of tones: on dark and light backgrounds, in 16 colours, and without colour. Pure.

The palette is Okabe and Ito's, which colour-blind readers can distinguish, blue to orange in maps.
A part of a step has the colour of its kind: compute is blue, communication violet, waiting orange, the
script's own code grey. No meaning depends on red against green; what is severe is also bold, and has a
mark.
"""

from functools import lru_cache

from rich.style import Style
from textual.theme import Theme

_DARK = {
    "dim": "#8a96a3", "faint": "#4a5561", "accent": "#56B4E9", "good": "#2fbf95", "warn": "#E69F00",
    "bad": "#FF7A3D", "forward": "#56B4E9", "backward": "#2479b5", "optimizer": "#7aa7d9",
    "cpu_optimizer": "#a9c9e8", "exposed": "#b48ae0", "data_wait": "#E69F00", "other": "#5b6672",
    "hidden": "#3f5f78", "s0": "#56B4E9", "s1": "#E69F00", "s2": "#00b386", "s3": "#CC79A7",
    "s4": "#F0E442", "s5": "#D55E00", "capacity": "#D55E00", "forecast": "#F0E442",
    "added": "#2fbf95", "removed": "#FF7A3D", "evaluation": "#8f9aa6", "checkpoint": "#c2b280",
    "garbage_collection": "#b58863", "compile": "#7d8894", "generation": "#4d74b8",
}  # fmt: skip
_LIGHT = {
    "dim": "#5c6670", "faint": "#b3bac1", "accent": "#0062a3", "good": "#00704f", "warn": "#8a5a00",
    "bad": "#b03a00", "forward": "#3a9bd6", "backward": "#00527f", "optimizer": "#3f6fa3",
    "cpu_optimizer": "#7fa3c7", "exposed": "#7d57ad", "data_wait": "#d99400", "other": "#a3abb3",
    "hidden": "#9cc3dd", "s0": "#0072B2", "s1": "#b87a00", "s2": "#00805e", "s3": "#a8497f",
    "s4": "#7d7600", "s5": "#b84a00", "capacity": "#b84a00", "forecast": "#7d7600",
    "added": "#00704f", "removed": "#b03a00", "evaluation": "#8a94a0", "checkpoint": "#9d8f5a",
    "garbage_collection": "#8a5f3c", "compile": "#717b86", "generation": "#27456e",
}  # fmt: skip
_SIXTEEN = {
    "dim": "bright_black", "faint": "bright_black", "accent": "cyan", "good": "green",
    "warn": "yellow", "bad": "red", "forward": "bright_cyan", "backward": "blue",
    "optimizer": "cyan", "cpu_optimizer": "bright_blue", "exposed": "magenta", "data_wait": "yellow",
    "other": "bright_black", "hidden": "cyan", "s0": "cyan", "s1": "yellow", "s2": "green",
    "s3": "magenta", "s4": "bright_yellow", "s5": "red", "capacity": "red",
    "forecast": "bright_yellow", "added": "green", "removed": "red", "evaluation": "white",
    "checkpoint": "bright_white", "garbage_collection": "bright_yellow", "compile": "white",
    "generation": "bright_blue",
}  # fmt: skip
_HEAT = {
    "dark": (
        "#000000 on #56B4E9", "#ffffff on #33698a", "#ffffff on #2b4a5e", "#d8dee6 on #2a323b",
        "#ffffff on #5c4613", "#ffffff on #8a5e10", "#000000 on #E69F00",
    ),
    "light": (
        "#000000 on #6aaedd", "#000000 on #9cc8e8", "#000000 on #c6dff0", "#000000 on #e4e8ec",
        "#000000 on #efd9b4", "#000000 on #ecb666", "#000000 on #e08a1e",
    ),
    "sixteen": (
        "black on bright_cyan", "black on cyan", "white on blue", "white on bright_black",
        "white on bright_black", "black on yellow", "black on bright_yellow",
    ),
}  # fmt: skip
"""Text and cell of each shade around the median; orange is high, as waiting is."""
_PLAIN = {
    "dim": Style(), "faint": Style(dim=True), "accent": Style(bold=True), "good": Style(),
    "warn": Style(bold=True), "bad": Style(bold=True, reverse=True),
    "blamed": Style(bold=True, reverse=True),
    "added": Style(bold=True),
    "removed": Style(dim=True), "capacity": Style(dim=True), "forecast": Style(dim=True),
}  # fmt: skip
_PALETTES = {"dark": _DARK, "light": _LIGHT, "sixteen": _SIXTEEN}
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
        ink, cell = _HEAT[background][int(name[4:])].split(" on ")
        return Style(color=ink, bgcolor=cell)
    if name == "blamed":
        return Style(
            color="bright_white", bgcolor="red" if background == "sixteen" else "#c62828", bold=True
        )
    return Style(
        color=_colour_of_tone(name, background),
        bgcolor=_colour_of_tone(back, background) if back else None,
        bold=True if name in _BOLD_TOO else None,
    )


def _colour_of_tone(tone: str, background: str) -> str | None:
    return _PALETTES[background].get(tone)


def background_of_theme(theme: Theme, *, no_color: bool) -> str:
    """The kind of background that *theme* has."""
    if no_color:
        return "none"
    if theme.ansi:
        return "sixteen"
    return "dark" if theme.dark else "light"


THEMES = (
    Theme(
        name="zeromon-dark", dark=True, primary="#56B4E9", secondary="#009E73", accent="#E69F00",
        warning="#E69F00", error="#D55E00", success="#009E73", foreground="#d8dee6",
        background="#0e1318", surface="#151b22", panel="#1d252e",
        variables={"footer-key-foreground": "#56B4E9", "border": "#33404d"},
    ),
    Theme(
        name="zeromon-light", dark=False, primary="#0072B2", secondary="#009E73", accent="#b87a00",
        warning="#b87a00", error="#b84a00", success="#00805e", foreground="#1c2329",
        background="#fbfbf9", surface="#f3f4f2", panel="#e8eae8",
        variables={"footer-key-foreground": "#0062a3", "border": "#c3cad0"},
    ),
    Theme(
        name="zeromon-contrast", dark=True, primary="#ffffff", secondary="#56B4E9",
        accent="#F0E442", warning="#F0E442", error="#FF7A3D", success="#56B4E9",
        foreground="#ffffff", background="#000000", surface="#000000", panel="#1a1a1a",
        variables={"footer-key-foreground": "#F0E442", "border": "#ffffff"},
    ),
)  # fmt: skip
