"""The keys and screens of the terminal view that the documentation names are those that it has."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

from textual.binding import Binding

from zeromon.diagnosis.rule import all_pages
from zeromon.tui.app import ZeromonApp
from zeromon.tui.screens.help import OWNERS
from zeromon.tui.screens.view import TABS, View

ROOT = Path(__file__).resolve().parents[2]
SIGNS = {
    "←": "left", "→": "right", "/": "slash", "<": "less_than_sign", ">": "greater_than_sign",
    "[": "left_square_bracket", "]": "right_square_bracket", "%": "percent_sign", "+": "plus",
    "-": "minus", "?": "question_mark", "esc": "escape",
}  # fmt: skip


def bound() -> set[str]:
    """Every key of the app, its screens, and the widgets on them."""
    owners = [ZeromonApp, View, *chain(*OWNERS.values())]
    keys: set[str] = set()
    for owner in owners:
        for binding in getattr(owner, "BINDINGS", ()):
            key = binding.key if isinstance(binding, Binding) else binding[0]
            keys.update(key.split(","))
    return keys


def documents() -> list[tuple[str, str]]:
    texts = [(str(page), page.read_text()) for page in (ROOT / "docs").rglob("*.md")]
    texts.append(("README.md", (ROOT / "README.md").read_text()))
    return texts + [(page.code, page.text) for page in all_pages().values()]


def test_the_page_of_the_terminal_view_lists_keys_that_exist() -> None:
    text = (ROOT / "docs" / "reference" / "tui.md").read_text()
    table = text[text.index("## Keys") : text.index("A filter is a list")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    named = [key for cell in cells for key in re.findall(r"`([^`]+)`", cell)]
    assert len(named) > 20
    keys = bound()
    assert [key for key in named if SIGNS.get(key, key) not in keys] == []


def test_the_page_of_the_terminal_view_lists_the_screens_in_their_order() -> None:
    text = (ROOT / "docs" / "reference" / "tui.md").read_text()
    rows = re.findall(r"^\| `(\d)` \| (\w+) \|", text, re.MULTILINE)
    assert rows == [(str(number), name.capitalize()) for number, name in enumerate(TABS, 1)]


def test_every_page_that_names_a_key_or_a_screen_names_one_that_exists() -> None:
    keys = bound()
    wrong = [
        f"{place}: {key}"
        for place, text in documents()
        for key in re.findall(r"\b[Kk]ey `([^`]+)`", text)
        if SIGNS.get(key, key) not in keys
    ]
    screens = {"findings.md": "findings", "memory.md": "memory", "communication.md": "communication"}
    for place, text in documents():
        for number in re.findall(r"\b[Ss]creen `(\d)`", text):
            expected = screens.get(Path(place).name, "communication")
            if TABS[int(number) - 1] != expected:
                wrong.append(f"{place}: screen {number}")
    assert wrong == []
