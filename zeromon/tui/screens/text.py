"""A screen with one text that scrolls: the report, the configuration, a rule, the keys."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult

from zeromon import report
from zeromon.tui.line import Line, clean
from zeromon.tui.scene import Scene
from zeromon.tui.screens.view import View
from zeromon.tui.widgets.page import Page


class TextScreen(View):
    """*write* makes the text of a scene."""

    def __init__(self, title: str, write: Callable[[Scene], str]) -> None:
        super().__init__()
        self._title = title
        self._text = write

    def body(self) -> ComposeResult:
        """The text."""
        yield Page(id="page")

    def on_mount(self) -> None:
        """A box around it, with a title."""
        found = self.query_one(Page)
        found.add_class("box")
        found.border_title = self._title.replace("[", r"\[")
        found.border_subtitle = "esc: back"
        found.focus()

    def focus_body(self) -> None:
        """The text."""
        self.query_one(Page).focus()

    def draw(self, scene: Scene) -> None:
        """The text of *scene*."""
        lines = text_lines(self._text(scene))
        self.query_one(Page).show(lambda _width: lines)


def text_lines(text: str) -> list[Line]:
    """Lines of a report: what is not indented is a title."""
    made: list[Line] = []
    for line in text.splitlines():
        tone = "" if line.startswith((" ", "|", "-", "`")) or not line else "bold"
        made.append([(clean(line), tone)])
    return made


def configuration(scene: Scene) -> str:
    """Engines, memory by role, offload, and every setting as it took effect."""
    run = scene.run
    blocks = [report.engines(run), report.roles(run), report.offload(run)]
    blocks.append(report.settings(run, written_only=False))
    said = "\n\n".join(block for block in blocks if block)
    strategy = run.ranks[0].strategy if run.ranks else "this run"
    return said or f"{strategy} has no configuration file of its own: nothing to show here"
