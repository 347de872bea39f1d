"""The list of all keys, read from the screens' bindings."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from textual.binding import Binding, BindingType
from textual.widget import Widget

from zeromon.tui.line import fit
from zeromon.tui.screens.collectives import Collectives, SpanLanes
from zeromon.tui.screens.communication import Communication
from zeromon.tui.screens.findings import Findings
from zeromon.tui.screens.logs import Logs
from zeromon.tui.screens.ranks import Ranks
from zeromon.tui.screens.timeline import Timeline
from zeromon.tui.widgets.panel import Page, TimeAxis
from zeromon.tui.widgets.table import Table

_SIGNS = {
    "slash": "/", "question_mark": "?", "less_than_sign": "<", "greater_than_sign": ">",
    "left_square_bracket": "[", "right_square_bracket": "]", "percent_sign": "%", "plus": "+",
    "equals_sign": "=", "minus": "-", "pageup": "page up", "pagedown": "page down",
    "left": "←", "right": "→", "up": "↑", "down": "↓", "shift+left": "shift ←",
    "shift+right": "shift →",
}  # fmt: skip

OWNERS: dict[str, tuple[type[Widget], ...]] = {
    "in a table": (Table,), "in a text": (Page,), "timeline": (TimeAxis, Timeline),
    "collectives of the last steps": (SpanLanes, Collectives), "communication": (Communication,),
    "ranks": (Ranks,), "findings": (Findings,), "logs": (Logs,),
}  # fmt: skip
"""Where keys work -> the widgets and screens that bind them, besides the application."""


def list_all_keys(everywhere: Iterable[BindingType], screen_name: str) -> str:
    """All keys as text, a title for each group; those of *screen_name* are first."""
    groups = [("everywhere", everywhere)]
    groups += [(name, chain(*(o.BINDINGS for o in owners))) for name, owners in OWNERS.items()]
    groups.sort(key=lambda group: group[0] != screen_name)
    blocks = []
    for title, bindings in groups:
        rows = [
            f"  {fit(', '.join(sign(key) for key in binding.key.split(',')), 16)} {binding.description}"
            for binding in bindings
            if isinstance(binding, Binding) and binding.description
        ]
        blocks.append("\n".join([title, *rows]))
    blocks.append(Path(__file__).with_name("help.txt").read_text(encoding="utf-8"))
    return "\n\n".join(blocks)


def sign(key: str) -> str:
    """The label of a key."""
    return _SIGNS.get(key.strip(), key.strip())
