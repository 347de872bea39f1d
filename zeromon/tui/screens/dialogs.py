"""Small windows over a screen: a line to type, the runs to choose from."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from zeromon.tui.line import Span, clean
from zeromon.tui.look import Look
from zeromon.tui.messages import RunChoice
from zeromon.tui.tables import Column, Columns
from zeromon.tui.widgets.table import Table


class Prompt(ModalScreen["str | None"]):
    """Asks for a line of text; None when it is left."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Leave")]

    def __init__(self, title: str, hint: str) -> None:
        super().__init__()
        self._title, self._hint = title, hint

    def compose(self) -> ComposeResult:
        """One line."""
        with Vertical(id="dialog") as box:
            box.border_title = self._title.replace("[", r"\[")
            box.border_subtitle = "enter: keep   esc: leave"
            yield Input(placeholder=self._hint, compact=True)

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


def _state(run: RunChoice, _: Look) -> Span:
    return clean(run.state), "" if run.address else "dim"


RUNS: Columns[RunChoice] = (
    Column(name="run", size=28, left=True,
           show=lambda r, _: (clean(r.run), "bold"), value=lambda r: r.run),
    Column(name="state", size=22, left=True, show=_state, value=lambda r: r.state),
    Column(name="command", size=20, left=True, grows=True, keep=1,
           show=lambda r, _: (clean(r.command), "dim"), value=lambda r: r.command),
)  # fmt: skip


class Runs(ModalScreen["RunChoice | None"]):
    """Live runs and recorded ones; Enter opens one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,r", "dismiss(None)", "Leave")]

    def __init__(self, choices: tuple[RunChoice, ...]) -> None:
        super().__init__()
        self._choices = choices

    def compose(self) -> ComposeResult:
        """A table."""
        with Vertical(id="dialog") as box:
            box.border_title = "runs"
            box.border_subtitle = "enter: open   esc: leave"
            yield Table(
                RUNS, lambda run: (run.run, run.address), id="runs", empty="no run is known"
            )

    def on_mount(self) -> None:
        """Fills it."""
        table = self.query_one("#runs", Table)
        table.focus()
        table.show(self._choices, Look())

    @on(Table.Chosen)
    def _chosen(self) -> None:
        self.dismiss(self.query_one("#runs", Table).current)
