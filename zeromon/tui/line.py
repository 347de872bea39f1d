"""Lines of styled text: what every drawing function returns. Pure; measured in terminal cells.

A tone is a name (``warn``, ``s0``, ``forward``); :mod:`zeromon.tui.line` says how it looks. ``a|b`` is
the colour of *a* on the colour of *b*. Texts that come from a run pass :func:`clean` before they are
drawn.
"""

import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from rich.cells import cell_len, set_cell_size

from zeromon.base.units import GLUE, glue_units

Span = tuple[str, str]
"""Text and style."""
Line = list[Span]

_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def clean(text: str) -> str:
    """*text* without control characters, joiners and direction overrides: each is replaced."""
    return text if text.isascii() and text.isprintable() else _replace_controls(text)


@lru_cache(4096)
def _replace_controls(text: str) -> str:
    # terminals differ in the width of a character with an emoji selector
    normalized = unicodedata.normalize("NFC", text).replace("\ufe0f", "")
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
    while cells(text) > width > 0:
        text = "…" + text.removeprefix("…")[1:]
    return text if width > 0 else ""


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
    """*text* broken at spaces into lines of at most *width* cells; a number keeps its unit."""
    space = max(8, width - cells(indent))
    rows, current = [], ""
    for token in glue_units(clean(text)).split(" "):
        while cells(token) > space:  # a name longer than the line
            if current:
                rows.append(current)
                current = ""
            # set_cell_size pads with a blank where it would split a wide character; the token has none,
            # but it may have other spaces: a bare rstrip() could leave no head, and the loop no end
            head = set_cell_size(token, space).rstrip(" ")
            rows.append(head)
            token = token[len(head) :]
        joined = f"{current} {token}" if current else token
        if cells(joined) > space:
            rows.append(current)
            joined = token
        current = joined
    return [[(indent + row.replace(GLUE, " "), tone)] for row in [*rows, current]]
