"""A screen with one text that scrolls: the report, the configuration, a rule, the keys."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from textual.app import ComposeResult

from zeromon.readout.text import capture_text
from zeromon.report import memory, render as config
from zeromon.report.table import wrapped_line
from zeromon.report.trace import captured
from zeromon.traces.analysis import read_result
from zeromon.tui.line import Line, clean
from zeromon.tui.screens.view import View
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Page


class TextScreen(View):
    """*write* makes the text."""

    FOCUS = "#page"

    def __init__(
        self, title: str, write: Callable[[ViewModel], str], *, is_markdown: bool = False
    ) -> None:
        super().__init__()
        self._title = title
        self._write = write
        self._lines = markdown_lines if is_markdown else text_lines

    def body(self) -> ComposeResult:
        """The text."""
        page = Page(self._title.replace("[", r"\["), id="page")
        page.border_subtitle = "esc: back"
        yield page

    def draw(self, model: ViewModel) -> None:
        """Draws the text."""
        text = self._write(model)
        self.query_one(Page).show(lambda width: self._lines(text, width))


def text_lines(text: str, width: int) -> list[Line]:
    """A report as lines of *width*: a line without indentation is a title."""
    made: list[Line] = []
    for line in text.splitlines():
        tone = "" if line.startswith((" ", "|", "-", "`")) or not line else "bold"
        made += [[(part, tone)] for part in wrapped_line(clean(line), width)]
    return made


def markdown_lines(text: str, width: int) -> list[Line]:
    """A page of a rule as lines of *width*, as `zeromon rule` prints it."""
    console = Console(width=width, color_system=None, legacy_windows=False)
    return [
        [(part.text, "bold" if part.style and part.style.bold else "") for part in line]
        for line in console.render_lines(Markdown(text), pad=False)
    ]


def configuration(model: ViewModel) -> str:
    """Engines, memory by role, offload, and the effective value of every setting."""
    run = model.run
    blocks = [config.engines(run), memory.roles(run), memory.offload(run)]
    blocks.append(config.settings(run, written_only=False))
    text = "\n\n".join(block for block in blocks if block)
    strategy = run.ranks[0].strategy if run.ranks else "this run"
    return text or f"{strategy} has no configuration file: there is nothing to show"


def analysis(model: ViewModel) -> str:
    """The last trace: its files, the live figures against it, the time of the device by activity."""
    made = model.run.capture
    if made is None:
        return "no trace was taken of this run: t takes one of the next two steps"
    if made.is_open:
        return capture_text(made, max((rank.step for rank in model.run.ranks), default=0))
    return captured(made, read_result(Path(made.folder)))
