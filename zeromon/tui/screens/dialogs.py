"""Dialogs over a screen: a line to type, and the list of runs."""

from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from zeromon.tui.columns import Column, Columns
from zeromon.tui.line import Span, clean
from zeromon.tui.runs import RunChoice
from zeromon.tui.widgets.table import Table


class Prompt(ModalScreen["str | None"]):
    """Returns a line of text; None when the user cancels."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel")]

    def __init__(self, title: str, hint: str) -> None:
        super().__init__()
        self._title, self._hint = title, hint

    def compose(self) -> ComposeResult:
        """The input."""
        with Vertical(id="dialog") as box:
            box.border_title = self._title.replace("[", r"\[")
            box.border_subtitle = "enter: save   esc: cancel"
            yield Input(placeholder=self._hint, compact=True)

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


def _state(run: RunChoice) -> Span:
    return clean(run.state), "" if run.address else "dim"


RUNS: Columns[RunChoice] = (
    Column("run", 28, lambda r: r.run, tone="bold"),
    Column("state", 22, lambda r: r.state, cell=_state),
    Column("command", 20, lambda r: r.command, tone="dim", keep=1, grows=True),
)


class Runs(ModalScreen["RunChoice | None"]):
    """Live and recorded runs; Enter opens one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,r", "dismiss(None)", "Cancel")]

    def __init__(self, choices: tuple[RunChoice, ...]) -> None:
        super().__init__()
        self._choices = choices

    def compose(self) -> ComposeResult:
        """The table."""
        with Vertical(id="dialog") as box:
            box.border_title = "runs"
            box.border_subtitle = "enter: open   esc: cancel"
            yield Table(
                RUNS,
                lambda run: (run.run, run.address),
                id="runs",
                empty="no run is known",
                classes="",
            )

    def on_mount(self) -> None:
        """Fills the table."""
        table = self.query_one("#runs", Table)
        table.focus()
        table.show(self._choices)

    @on(Table.Chosen)
    def _chosen(self) -> None:
        self.dismiss(self.query_one("#runs", Table).current)


class ColumnChooser(ModalScreen[None]):
    """The columns of a table: Enter or space shows or hides the one under the cursor, at once."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,C", "dismiss(None)", "Close"),
        Binding("space", "turn_over", "Show or hide"),
    ]

    def __init__(self, of: Table[Any]) -> None:
        super().__init__()
        self._of = of
        self._columns: Columns[Column[Any]] = (
            Column("shown", 7, lambda c: c.name in of.hidden, left=False, cell=self._mark),
            Column("column", 20, lambda c: c.name, tone="bold", grows=True),
        )

    def _mark(self, column: Column[Any]) -> Span:
        return ("", "") if column.name in self._of.hidden else ("x", "accent")

    def compose(self) -> ComposeResult:
        """The table of columns."""
        with Vertical(id="dialog") as box:
            box.border_title = "columns"
            box.border_subtitle = "enter: show or hide   esc: close"
            yield Table(self._columns, lambda column: column.name, id="columns", classes="")

    def on_mount(self) -> None:
        """Fills the table."""
        table = self.query_one("#columns", Table)
        table.focus()
        table.show(self._of.columns)

    @on(Table.Chosen)
    def action_turn_over(self) -> None:
        """Shows or hides the column under the cursor; one column always stays."""
        table = self.query_one("#columns", Table)
        column: Column[Any] | None = table.current
        if column is not None:
            hidden = self._of.hidden ^ {column.name}
            if len(hidden) < len(self._of.columns):
                self._of.hide(hidden)
            table.show(self._of.columns)
