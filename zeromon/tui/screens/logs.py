"""The log: events of ranks, findings, traces, marks, and warnings of the agents."""

from typing import Any

from textual.app import ComposeResult

from zeromon.tui.columns import TableExport
from zeromon.tui.event_log import LogEntry
from zeromon.tui.line import Line, wrapped
from zeromon.tui.screens.view import View
from zeromon.tui.status_text import clock
from zeromon.tui.tables import NOTES
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.page import Page
from zeromon.units import human_count


class Logs(View):
    """One line for each entry, the newest at the end."""

    FOCUS = "#notes"
    TAB = "logs"
    HINT = "part of an entry"

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def body(self) -> ComposeResult:
        """The log."""
        yield Page("notes", id="notes")

    def filter_text(self) -> str:
        """The filter of the log; ranks have their own."""
        return self._text

    def filter(self, text: str) -> None:
        """Shows the entries that contain *text*."""
        self._text = text
        self.show()

    def _notes(self, model: ViewModel) -> list[LogEntry]:
        return [note for note in all_notes(model) if self._text.lower() in note.text.lower()]

    def draw(self, model: ViewModel) -> None:
        """Draws the entries that match."""
        notes = self._notes(model)
        self.query_one(Page).show(lambda width: note_lines(notes, width), follow=True)

    def sheet(self, model: ViewModel) -> TableExport[Any]:
        """The entries that match."""
        return TableExport("notes", NOTES, self._notes(model))


def all_notes(model: ViewModel) -> list[LogEntry]:
    """Events and marks, in the order of time."""
    marks = [
        LogEntry(
            mark.wall,
            f"▲ mark at step {human_count(mark.step)}: {mark.text or '(no text)'}",
            "accent",
        )
        for mark in model.marks
    ]
    return sorted([*model.log, *marks], key=lambda note: note.wall)


def note_lines(notes: list[LogEntry], width: int) -> list[Line]:
    """Time and text of each entry; a long text continues on further lines."""
    lines: list[Line] = []
    for note in notes:
        first, *rest = wrapped(note.text, width - 10, note.tone)
        lines.append([(f"{clock(note.wall)}  ", "dim"), *first])
        lines += [[(" " * 10, ""), *more] for more in rest]
    return lines or [[("nothing has happened yet", "dim")]]
