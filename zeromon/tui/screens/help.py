"""The keys, as the screens themselves have them."""

from __future__ import annotations

from collections.abc import Iterable

from textual.binding import Binding, BindingType

from zeromon.tui.line import fit

_SIGNS = {
    "slash": "/", "question_mark": "?", "less_than_sign": "<", "greater_than_sign": ">",
    "left_square_bracket": "[", "right_square_bracket": "]", "percent_sign": "%", "plus": "+",
    "equals_sign": "=", "minus": "-", "pageup": "page up", "pagedown": "page down",
    "left": "←", "right": "→", "up": "↑", "down": "↓", "shift+left": "shift ←",
    "shift+right": "shift →",
}  # fmt: skip

_WORDS = """
A filter of ranks is words that must all hold: 3, or 0-7,16, are ranks; exposed>10 (%), late>0.01 and
step>0.5 (seconds), memory>=60 (GiB), risk>50 (%) compare; anything else is a part of the node, the
unit, the state or the device.

A mark is kept in the run's folder on this machine; of a run elsewhere, as long as the view is open.
Files are written to the working folder.
"""


def keys(groups: Iterable[tuple[str, Iterable[BindingType]]]) -> str:
    """Bindings as a text: a title a group, a line a key."""
    blocks = []
    for title, bindings in groups:
        lines = [
            f"  {fit(', '.join(sign(key) for key in binding.key.split(',')), 16)} {binding.description}"
            for binding in bindings
            if isinstance(binding, Binding) and binding.description
        ]
        blocks.append("\n".join([title, *lines]))
    return "\n\n".join(blocks) + "\n" + _WORDS


def sign(key: str) -> str:
    """A key as it is on a keyboard."""
    return _SIGNS.get(key.strip(), key.strip())
