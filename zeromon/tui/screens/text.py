"""A screen with one text that scrolls: the report, the configuration, a rule, the keys."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from textual.app import ComposeResult

from zeromon.base.units import wrap_report_line
from zeromon.readout import report
from zeromon.readout.text import capture_text
from zeromon.readout.trace_report import capture_report
from zeromon.traces.analysis import read_analysis_result
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
        self._lines = lines_of_markdown if is_markdown else lines_of_report

    def body(self) -> ComposeResult:
        """The text."""
        page = Page(self._title.replace("[", r"\["), id="page")
        page.border_subtitle = "↑ ↓ page up, page down: scroll   esc: back"
        yield page

    def draw(self, model: ViewModel) -> None:
        """Draws the text."""
        content = self._write(model)
        self.query_one(Page).show(lambda width: self._lines(content, width))


def lines_of_report(report: str, width: int) -> list[Line]:
    """A report as lines of *width*: a line without indentation is a title."""
    rows: list[Line] = []
    for report_line in report.splitlines():
        tone = "" if report_line.startswith((" ", "|", "-", "`")) or not report_line else "bold"
        rows += [[(row, tone)] for row in wrap_report_line(clean(report_line), width)]
    return rows


def lines_of_markdown(markdown: str, width: int) -> list[Line]:
    """A page of a rule as lines of *width*, as `zeromon rule` prints it."""
    console = Console(width=width, color_system=None, legacy_windows=False)
    return [
        [(span.text, "bold" if span.style and span.style.bold else "") for span in row]
        for row in console.render_lines(Markdown(markdown), pad=False)
    ]


def configuration_text(model: ViewModel) -> str:
    """Engines, memory by role, offload, and the effective value of every setting."""
    run = model.run
    blocks = [report.engine_block(run), report.by_role(run), report.offload_block(run)]
    blocks.append(report.settings_block(run, written_only=False))
    page = "\n\n".join(block for block in blocks if block)
    strategy = run.ranks[0].strategy if run.ranks else "this run"
    return page or f"{strategy} has no configuration file: there is nothing to show"


def trace_analysis_text(model: ViewModel) -> str:
    """The last trace: its files, the live figures against it, the time of the device by activity."""
    capture = model.run.capture
    if capture is None:
        return "no trace was taken of this run: t takes one of the next two steps"
    if capture.is_open:
        return capture_text(capture, model.run.last_step)
    return capture_report(capture, read_analysis_result(Path(capture.folder)))
