"""Lines of styled text: what every drawing function returns. Pure; measured in terminal cells.

A tone is a name (``warn``, ``s0``, ``forward``); :mod:`zeromon.tui.styles` says how it looks. ``a|b`` is
the colour of *a* on the colour of *b*. Texts that come from a run pass :func:`clean` before they are
drawn.
"""

import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
"""Text and style."""
Line = list[Span]

_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def clean(text: str) -> str:
    """*text* without control characters, joiners and direction overrides: each is replaced."""
    return text if text.isascii() and text.isprintable() else _cleaned(text)


@lru_cache(4096)
def _cleaned(text: str) -> str:
    kept = unicodedata.normalize("NFC", text)
    return "".join("·" if unicodedata.category(c) in _UNSEEN else c for c in kept)


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


def tail(text: str, width: int) -> str:
    """The end of *text* in at most *width* cells: ends of names differ more than beginnings."""
    while cells(text) > width:
        text = "…" + text.removeprefix("…")[1:]
    return text


def length(line: Iterable[Span]) -> int:
    """The width of a line in cells."""
    return sum(cells(text) for text, _ in line)


def cut(line: Line, width: int) -> Line:
    """*line* in at most *width* cells, with an ellipsis where it is cut."""
    if length(line) <= width:
        return line
    made: Line = []
    for text, tone in line:
        room = width - length(made)
        if cells(text) >= room:
            made.append((fit(text + " ", room), tone))
            break
        made.append((text, tone))
    return made


def padded(line: Line, width: int) -> Line:
    """*line* in exactly *width* cells."""
    made = cut(line, width)
    gap = width - length(made)
    return [*made, (" " * gap, "")] if gap > 0 else made


def spread(left: Line, right: Line, width: int) -> Line:
    """*left* and *right* at the two ends; cuts *left* where there is no room."""
    right = cut(right, width)
    room = width - length(right)
    return [*padded(left, room), *right]


def beside(blocks: Iterable[tuple[list[Line], int]], gap: int = 2) -> list[Line]:
    """Blocks of the given widths, side by side."""
    chosen = list(blocks)
    height = max((len(lines) for lines, _ in chosen), default=0)
    made: list[Line] = [[] for _ in range(height)]
    for index, (lines, width) in enumerate(chosen):
        for row in range(height):
            if index:
                made[row].append((" " * gap, ""))
            made[row] += padded(lines[row] if row < len(lines) else [], width)
    return made


def merged(line: Line) -> Line:
    """*line* with neighbours of one style joined."""
    made: Line = []
    for text, tone in line:
        if made and made[-1][1] == tone:
            made[-1] = made[-1][0] + text, tone
        else:
            made.append((text, tone))
    return made


def plain(line: Iterable[Span]) -> str:
    """The text of a line without styles."""
    return "".join(text for text, _ in line)


def wrapped(text: str, width: int, tone: str = "", indent: str = "") -> list[Line]:
    """*text* broken at spaces into lines of at most *width* cells."""
    room = max(8, width - cells(indent))
    lines, now = [], ""
    for word in clean(text).split(" "):
        while cells(word) > room:  # a name longer than the line
            if now:
                lines.append(now)
                now = ""
            head = set_cell_size(word, room).rstrip()
            lines.append(head)
            word = word[len(head) :]
        joined = f"{now} {word}" if now else word
        if cells(joined) > room:
            lines.append(now)
            joined = word
        now = joined
    return [[(indent + line, tone)] for line in [*lines, now]]
