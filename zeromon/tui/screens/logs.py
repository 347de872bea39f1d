"""What happened: the agent's notes, ranks that came and went, findings, traces, marks."""

from __future__ import annotations

from typing import Any

from textual.app import ComposeResult

from zeromon.tui.line import Line, wrapped
from zeromon.tui.notes import Note
from zeromon.tui.scene import Scene
from zeromon.tui.screens.view import View
from zeromon.tui.tables import NOTES, Sheet
from zeromon.tui.widgets.page import Page
from zeromon.tui.words import clock
from zeromon.units import human_count


class Logs(View):
    """One note a line, the newest at the end."""

    TAB = "logs"
    HINT = "a part of a note"

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def body(self) -> ComposeResult:
        """The notes."""
        yield Page("notes", id="notes")

    def on_mount(self) -> None:
        """A box around them."""
        self.query_one(Page).add_class("box")
        self.focus_body()

    def focus_body(self) -> None:
        """The notes."""
        self.query_one(Page).focus()

    def filter_text(self) -> str:
        """That of the notes; ranks have theirs."""
        return self._text

    def filter(self, text: str) -> None:
        """Notes with *text* in them."""
        self._text = text
        self.show()

    def _notes(self, scene: Scene) -> list[Note]:
        return [note for note in all_notes(scene) if self._text.lower() in note.text.lower()]

    def draw(self, scene: Scene) -> None:
        """All that match."""
        notes = self._notes(scene)
        self.query_one(Page).show(lambda width: note_lines(notes, width), follow=True)

    def sheet(self, scene: Scene) -> Sheet[Any]:
        """The notes."""
        return Sheet("notes", NOTES, self._notes(scene))


def all_notes(scene: Scene) -> list[Note]:
    """Notes and marks, by time."""
    marks = [
        Note(
            mark.wall,
            f"▲ mark at step {human_count(mark.step)}: {mark.text or '(no text)'}",
            "accent",
        )
        for mark in scene.marks
    ]
    return sorted([*scene.notes, *marks], key=lambda note: note.wall)


def note_lines(notes: list[Note], width: int) -> list[Line]:
    """Time and text; a long text goes on below."""
    lines: list[Line] = []
    for note in notes:
        first, *rest = wrapped(note.text, width - 10, note.tone)
        lines.append([(f"{clock(note.wall)}  ", "dim"), *first])
        lines += [[(" " * 10, ""), *more] for more in rest]
    return lines or [[("nothing has happened yet", "dim")]]
