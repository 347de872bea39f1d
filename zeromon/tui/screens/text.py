"""A screen with one text that scrolls: the report, the configuration, a rule, the keys."""

from collections.abc import Callable

from textual.app import ComposeResult

from zeromon.report import configuration as config, memory
from zeromon.tui.line import Line, clean
from zeromon.tui.screens.view import View
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.page import Page


class TextScreen(View):
    """*write* makes the text."""

    FOCUS = "#page"

    def __init__(self, title: str, write: Callable[[ViewModel], str]) -> None:
        super().__init__()
        self._title = title
        self._text = write

    def body(self) -> ComposeResult:
        """The text."""
        page = Page(self._title.replace("[", r"\["), id="page")
        page.border_subtitle = "esc: back"
        yield page

    def draw(self, model: ViewModel) -> None:
        """Draws the text."""
        lines = text_lines(self._text(model))
        self.query_one(Page).show(lambda _width: lines)


def text_lines(text: str) -> list[Line]:
    """A report as lines: a line without indentation is a title."""
    made: list[Line] = []
    for line in text.splitlines():
        tone = "" if line.startswith((" ", "|", "-", "`")) or not line else "bold"
        made.append([(clean(line), tone)])
    return made


def configuration(model: ViewModel) -> str:
    """Engines, memory by role, offload, and the effective value of every setting."""
    run = model.run
    blocks = [config.engines(run), memory.roles(run), memory.offload(run)]
    blocks.append(config.settings(run, written_only=False))
    text = "\n\n".join(block for block in blocks if block)
    strategy = run.ranks[0].strategy if run.ranks else "this run"
    return text or f"{strategy} has no configuration file: there is nothing to show"
