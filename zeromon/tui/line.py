"""Lines of styled text, which every drawing function returns, and their colours. Pure; in cells.

A tone is a name (``warn``, ``s0``, ``forward``); :mod:`zeromon.tui.line` says how it looks. ``a|b`` is
the colour of *a* on the colour of *b*. Texts that come from a run pass :func:`clean` before they are
drawn.
"""

import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from textual.theme import Theme

Span = tuple[str, str]
"""Text and style."""
Line = list[Span]

_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def clean(text: str) -> str:
    """*text* without control characters, joiners and direction overrides: each is replaced."""
    return text if text.isascii() and text.isprintable() else _replace_controls(text)


@lru_cache(4096)
def _replace_controls(text: str) -> str:
    normalized = unicodedata.normalize("NFC", text)
    return "".join("·" if unicodedata.category(c) in _UNSEEN else c for c in normalized)


def cells(text: str) -> int:
    """The width of *text* in cells."""
    return len(text) if text.isascii() else cell_len(text)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """*text* in exactly *width* cells: padded, or cut with an ellipsis."""
    size = cells(text)
    if size > width:
        return set_cell_size(text, max(0, width - 1)) + "…" if width > 0 else ""
    gap = " " * (width - size)
    return gap + text if right else text + gap


def text_tail(text: str, width: int) -> str:
    """The end of *text* in at most *width* cells: ends of names differ more than beginnings."""
    while cells(text) > width:
        text = "…" + text.removeprefix("…")[1:]
    return text


def line_width(spans: Iterable[Span]) -> int:
    """The width of a line in cells."""
    return sum(cells(chunk) for chunk, _ in spans)


def cut_line(spans: Line, width: int) -> Line:
    """*spans* in at most *width* cells, with an ellipsis where it is cut."""
    if line_width(spans) <= width:
        return spans
    kept_spans: Line = []
    for chunk, tone in spans:
        space = width - line_width(kept_spans)
        if cells(chunk) >= space:
            kept_spans.append((fit(chunk + " ", space), tone))
            break
        kept_spans.append((chunk, tone))
    return kept_spans


def pad_line(spans: Line, width: int) -> Line:
    """*spans* in exactly *width* cells."""
    fitted = cut_line(spans, width)
    gap = width - line_width(fitted)
    return [*fitted, (" " * gap, "")] if gap > 0 else fitted


def join_at_ends(left: Line, right: Line, width: int) -> Line:
    """*left* and *right* at the two ends; cuts *left* where there is no room."""
    right = cut_line(right, width)
    space = width - line_width(right)
    return [*pad_line(left, space), *right]


def join_side_by_side(blocks: Iterable[tuple[list[Line], int]], gap: int = 2) -> list[Line]:
    """Blocks of the given widths, side by side."""
    chosen = list(blocks)
    height = max((len(block) for block, _ in chosen), default=0)
    joined: list[Line] = [[] for _ in range(height)]
    for index, (block, width) in enumerate(chosen):
        for row in range(height):
            if index:
                joined[row].append((" " * gap, ""))
            joined[row] += pad_line(block[row] if row < len(block) else [], width)
    return joined


def merge_equal_tones(spans: Line) -> Line:
    """*spans* with neighbours of one style joined."""
    joined: Line = []
    for chunk, tone in spans:
        if joined and joined[-1][1] == tone:
            joined[-1] = joined[-1][0] + chunk, tone
        else:
            joined.append((chunk, tone))
    return joined


def plain_text(spans: Iterable[Span]) -> str:
    """The text of a line without styles."""
    return "".join(chunk for chunk, _ in spans)


def wrap_text(text: str, width: int, tone: str = "", indent: str = "") -> list[Line]:
    """*text* broken at spaces into lines of at most *width* cells."""
    space = max(8, width - cells(indent))
    rows, current = [], ""
    for token in clean(text).split(" "):
        while cells(token) > space:  # a name longer than the line
            if current:
                rows.append(current)
                current = ""
            head = set_cell_size(token, space).rstrip()
            rows.append(head)
            token = token[len(head) :]
        joined = f"{current} {token}" if current else token
        if cells(joined) > space:
            rows.append(current)
            joined = token
        current = joined
    return [[(indent + row, tone)] for row in [*rows, current]]


# ---- the colours of tones: on dark and light backgrounds, in 16 colours, and without colour ------

# The palette is Okabe and Ito's, which colour-blind readers can distinguish, and cividis for heat maps.
# No meaning depends on red against green; what is severe is also bold, and has a mark.

HEAT_LEVELS = 8

_DARK = {
    "dim": "#8a96a3", "faint": "#4a5561", "accent": "#56B4E9", "good": "#2fbf95", "warn": "#E69F00",
    "bad": "#FF7A3D", "forward": "#56B4E9", "backward": "#2479b5", "optimizer": "#009E73",
    "cpu_optimizer": "#86d9bd", "exposed": "#D55E00", "data_wait": "#E69F00", "other": "#5b6672",
    "hidden": "#3f5f78", "s0": "#56B4E9", "s1": "#E69F00", "s2": "#00b386", "s3": "#CC79A7",
    "s4": "#F0E442", "s5": "#D55E00", "capacity": "#D55E00", "forecast": "#F0E442",
    "added": "#2fbf95", "removed": "#FF7A3D", "evaluation": "#CC79A7", "checkpoint": "#F0E442",
    "garbage_collection": "#b58863", "compile": "#9d8cff", "generation": "#c9a227",
}  # fmt: skip
_LIGHT = {
    "dim": "#5c6670", "faint": "#b3bac1", "accent": "#0062a3", "good": "#00704f", "warn": "#8a5a00",
    "bad": "#b03a00", "forward": "#3a9bd6", "backward": "#00527f", "optimizer": "#00805e",
    "cpu_optimizer": "#63bfa3", "exposed": "#D55E00", "data_wait": "#d99400", "other": "#a3abb3",
    "hidden": "#9cc3dd", "s0": "#0072B2", "s1": "#b87a00", "s2": "#00805e", "s3": "#a8497f",
    "s4": "#7d7600", "s5": "#b84a00", "capacity": "#b84a00", "forecast": "#7d7600",
    "added": "#00704f", "removed": "#b03a00", "evaluation": "#a8497f", "checkpoint": "#9d9500",
    "garbage_collection": "#8a5f3c", "compile": "#6a55d9", "generation": "#8a6d00",
}  # fmt: skip
_SIXTEEN = {
    "dim": "bright_black", "faint": "bright_black", "accent": "cyan", "good": "green",
    "warn": "yellow", "bad": "red", "forward": "bright_cyan", "backward": "blue",
    "optimizer": "green", "cpu_optimizer": "bright_green", "exposed": "red", "data_wait": "yellow",
    "other": "bright_black", "hidden": "cyan", "s0": "cyan", "s1": "yellow", "s2": "green",
    "s3": "magenta", "s4": "bright_yellow", "s5": "red", "capacity": "red",
    "forecast": "bright_yellow", "added": "green", "removed": "red", "evaluation": "magenta",
    "checkpoint": "bright_yellow", "garbage_collection": "bright_red", "compile": "bright_magenta",
    "generation": "bright_blue",
}  # fmt: skip
_HEAT_DARK = (
    "#0b2a5c", "#1f3f70", "#41526f", "#5f6672", "#7d7b78", "#a09371", "#c8b060", "#fde945",
)  # fmt: skip
"""Eight levels of cividis, which also differ in lightness."""
_HEAT_SIXTEEN = (
    "blue", "blue", "cyan", "cyan", "green", "yellow", "bright_yellow", "bright_white",
)  # fmt: skip
_PLAIN = {
    "dim": Style(), "faint": Style(dim=True), "accent": Style(bold=True), "good": Style(),
    "warn": Style(bold=True), "bad": Style(bold=True, reverse=True), "added": Style(bold=True),
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
    return Style(
        color=_colour_of_tone(name, background),
        bgcolor=_colour_of_tone(back, background) if back else None,
        bold=True if name in _BOLD_TOO else None,
    )


def _colour_of_tone(tone: str, background: str) -> str | None:
    if tone.startswith("heat"):
        level = int(tone[4:])
        return (_HEAT_SIXTEEN if background == "sixteen" else _HEAT_DARK)[level]
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
