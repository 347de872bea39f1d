"""The log: events of ranks, findings, traces, marks, and warnings of the agents."""

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.timer import Timer

from zeromon.base.units import human_count
from zeromon.readout.figures import SECONDS, TEXT
from zeromon.readout.tables import Column, Columns
from zeromon.tui.columns import TableExport
from zeromon.tui.event_log import LogEntry
from zeromon.tui.feed import OutputArrived
from zeromon.tui.line import Line, clean, wrap_text
from zeromon.tui.screens.view import View
from zeromon.tui.status_text import clock
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Page

_READ_SECONDS = 1.0
NOTES: Columns[LogEntry] = (
    Column("wall", lambda note: note.wall, SECONDS),
    Column("text", lambda note: note.text, TEXT),
)
"""The columns of the exported log."""


class Logs(View):
    """One line for each entry, the newest at the end."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("o", "output", "Training's output")]
    FOCUS = "#notes"
    TAB = "logs"
    HINT = "part of an entry"
    OWN_FILTER = True

    def __init__(self) -> None:
        super().__init__()
        self._output: OutputArrived | None = None
        """The training's output, where that is shown."""
        self._timer: Timer | None = None

    def body(self) -> ComposeResult:
        """The log."""
        yield Page("notes", id="notes")

    def _matching_notes(self, model: ViewModel) -> list[LogEntry]:
        return [note for note in events_and_marks(model) if self._text.lower() in note.text.lower()]

    def draw(self, model: ViewModel) -> None:
        """Draws the entries that match, or the training's output."""
        page = self.query_one(Page)
        if self._output is not None:
            reply, filter_text = self._output, self._text.lower()
            page.border_title = clean(reply.output.path if reply.output is not None else "output")
            page.show(lambda width: output_lines(reply, filter_text, width), follow=True)
            return
        notes = self._matching_notes(model)
        page.border_title = "notes"
        page.show(lambda width: note_lines(notes, width), follow=True)

    def action_output(self) -> None:
        """Shows the training's output, or the log again."""
        if self._timer is not None:
            self._timer.stop()
            self._timer = self._output = None
            self.show()
            return
        self._output = OutputArrived(None, "reading ...")
        self._timer = self.set_interval(_READ_SECONDS, self._read)
        self._read()

    def _read(self) -> None:
        rank = self.host.model.focus() if self.host.model is not None else None
        # The timer of a screen that is covered goes on: only the one on top reads
        if rank is None or self.app.screen is not self:
            return
        source, pid = self.host.source, rank.pid
        self.read_in_thread(
            lambda: OutputArrived(source.output(pid)), lambda reason: OutputArrived(None, reason)
        )

    def on_output_arrived(self, message: OutputArrived) -> None:
        """Shows what was read, unless the log is shown again."""
        if self._timer is not None:
            self._output = message
            self.show()

    def sheet(self, model: ViewModel) -> TableExport[Any]:
        """The entries that match."""
        return TableExport("notes", NOTES, self._matching_notes(model))


def events_and_marks(model: ViewModel) -> list[LogEntry]:
    """Events and marks, in the order of time."""
    marks = [
        LogEntry(
            mark.wall, f"▲ mark at step {human_count(mark.step)}: {mark.text or '(no text)'}", "accent"
        )
        for mark in model.marks
    ]
    return sorted([*model.log, *marks], key=lambda note: note.wall)


def output_lines(reply: OutputArrived, phrase: str, width: int) -> list[Line]:
    """The lines that contain *phrase*, or why there are none."""
    if reply.output is None:
        return wrap_text(reply.trouble, width, "warn")
    matches = [raw for raw in reply.output.lines if phrase in raw.lower()]
    return [row for raw in matches for row in wrap_text(raw, width)] or [[("nothing yet", "dim")]]


def note_lines(notes: list[LogEntry], width: int) -> list[Line]:
    """Time and text of each entry; a long text continues on further lines."""
    rows: list[Line] = []
    for note in notes:
        head_row, *tail_rows = wrap_text(note.text, width - 10, note.tone)
        rows.append([(f"{clock(note.wall)}  ", "dim"), *head_row])
        rows += [[(" " * 10, ""), *row] for row in tail_rows]
    return rows or [[("nothing has happened yet", "dim")]]
