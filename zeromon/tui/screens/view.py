"""The common part of all screens: the run and its risk at the top, tabs, the filter's input, keys."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen, Screen, ScreenResultType
from textual.widgets import Input

from zeromon.base.errors import ZeromonError
from zeromon.readout.figures import TEXT
from zeromon.readout.tables import Column, Columns
from zeromon.snapshot.run import FleetNode
from zeromon.sources.base import Source
from zeromon.tui import status_text
from zeromon.tui.columns import TableExport
from zeromon.tui.feed import RunChoice
from zeromon.tui.line import Line, join_at_ends, line_width, wrap_text
from zeromon.tui.view_model import ViewModel, draw_scrubber, status_line
from zeromon.tui.widgets.panel import Keys, Page, Panel
from zeromon.tui.widgets.table import Table

TABS = ("overview", "memory", "communication", "timeline", "ranks", "findings", "logs")


class Tabs(Panel):
    """The names of the screens; a click opens a screen."""

    def on_click(self, event: events.Click) -> None:
        """Opens the screen under the pointer."""
        upto = 0
        for name, (label, _) in zip(TABS, self.lines()[0], strict=False):
            upto += len(label)
            if event.x < upto:
                self.app.switch_mode(name)
                return


class Host(Protocol):
    """The parts of its application that a screen needs."""

    now: Callable[[], float]
    """Seconds since the epoch."""

    @property
    def model(self) -> ViewModel | None:
        """The model that is drawn; None before the first snapshot."""

    @property
    def trouble(self) -> str:
        """Why there is no newer snapshot; "" where nothing is wrong."""

    @property
    def source(self) -> Source:
        """Where the snapshots come from; it may block, so that only a thread reads it."""

    @property
    def rank_filter(self) -> str:
        """The filter of ranks, as the user typed it."""

    def filter_ranks(self, filter_text: str) -> None:
        """Shows only the ranks that *filter_text* selects."""

    def open_rank(self, rank: int) -> None:
        """Opens the screen of one rank."""

    def open_node(self, node: FleetNode) -> None:
        """Shows the ranks of one node of a large run."""


class View(Screen[None]):
    """A screen that draws a view model. *TAB* is its name among the tabs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "ask", "Filter"),
        Binding("escape", "leave", "Back", show=False),
    ]
    AUTO_FOCUS = "#body"
    FOCUS = ""
    """Selects the widget that the screen's keys belong to; "" for none."""
    TAB = ""
    HINT = "ranks: 3   0-7,16   exposed>10   memory>=60   late>0.01   part of a node, state or unit"

    OWN_FILTER = False
    """True if the filter is of the screen's own rows; ranks have their own."""

    _laid_for: Size | None = None

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        # mounting styles the screen; without this count, Textual would read all rules twice more
        self._css_update_count = self.app._css_update_count

    @property
    def host(self) -> Host:
        """The application."""
        return cast("Host", self.app)

    def compose(self) -> ComposeResult:
        """The lines at the top, the screen's own part, the lines at the bottom."""
        yield Panel(id="head")
        yield Panel(id="risk")
        yield Tabs(id="tabs")
        yield from self.body()
        yield Input(placeholder=self.HINT, id="filter", compact=True)
        yield Panel(id="scrubber")
        yield Keys(id="keys")

    def body(self) -> ComposeResult:
        """The screen's own part."""
        yield from ()

    def draw(self, model: ViewModel) -> None:
        """Draws *model* in the screen's own part."""

    def sheet(self, model: ViewModel) -> TableExport[Any] | None:  # noqa: ARG002
        """The screen's table, for a CSV file; None without one."""
        return None

    def on_mount(self) -> None:
        """Focuses the screen's own part."""
        if self.FOCUS:
            self.focus_body()

    def on_screen_resume(self) -> None:
        """Draws what has changed while another screen was on top."""
        self.show()

    def on_resize(self, event: events.Resize) -> None:
        """Draws again, because some lines depend on the width."""
        if event.size != self._laid_for:
            self._laid_for = event.size
            # The panels have their new sizes only after the layout
            self.call_after_refresh(self.show)

    def show(self) -> None:
        """Draws the application's view model."""
        model = self.host.model
        if not self._is_laid_out():
            return
        self.show_snapshot_age()
        if model is not None:
            self.query_one("#risk", Panel).show(
                lambda width, _h: [status_text.verdict_line(model.run, width)]
            )
            self.query_one("#tabs", Tabs).show(lambda width, _h: [_tab_row(self.TAB, model, width)])
            panel = self.query_one("#scrubber", Panel)
            panel.set_class(model.paused or model.replay, "-shown")
            panel.show(lambda width, _h: [draw_scrubber(model, width)])
            self.draw(model)

    def draw_no_rank(self, model: ViewModel) -> None:
        """Says in each part why no rank is shown: the part may show one of another run."""

        def reason_lines(width: int, _height: int = 0) -> list[Line]:
            return wrap_text(why_no_rank(model), width, "dim")

        for box in self.query(".box"):
            if isinstance(box, Panel | Page):
                box.border_title = ""
                box.show(reason_lines)

    def show_snapshot_age(self) -> None:
        """Draws the first line: which run it is, and how old its snapshot is."""
        if not self._is_laid_out():
            return
        model, now_seconds = self.host.model, self.host.now()
        head = self.query_one("#head", Panel)
        if model is None:
            waiting = self.host.trouble or "waiting for the first snapshot"
            head.show(lambda _w, _h: [[(" zeromon ", "badge"), (f"  {waiting}", "")]])
        else:
            status = status_line(model, now_seconds)

            def draw_head(width: int, _height: int) -> list[Line]:
                head_spans = status_text.head_line(model.run, width - line_width(status) - 1)
                return [join_at_ends(head_spans, status, width)]

            head.show(draw_head)

    def _is_laid_out(self) -> bool:
        """Returns whether the widgets exist: the clock's first tick may come before them."""
        return self.is_mounted and bool(self.query("#head"))

    def read_in_thread(self, load: Callable[[], Message], failed: Callable[[str], Message]) -> None:
        """Posts what *load* returns, else what *failed* makes of its error: a source may block."""

        def post_result() -> None:
            try:
                self.post_message(load())
            except ZeromonError as error:
                self.post_message(failed(error.told))

        threading.Thread(target=post_result, daemon=True).start()

    def action_leave(self) -> None:
        """Closes the filter's input, clears the filter, or goes back to the screen below."""
        entry = self.query_one("#filter", Input)
        if entry.display:
            entry.value = ""
            self._close(entry)
        elif self.filter_in_force():
            self.filter("")
        elif len(self.app.screen_stack) > 1:
            self.app.pop_screen()

    def action_ask(self) -> None:
        """Opens the input of the filter."""
        entry = self.query_one("#filter", Input)
        entry.value = self.filter_in_force()
        entry.display = True
        self.set_focus(entry)  # at once, so that the next key goes to the input

    def filter_in_force(self) -> str:
        """The filter that is in force."""
        return self._text if self.OWN_FILTER else self.host.rank_filter

    def filter(self, filter_text: str) -> None:
        """Filters by *filter_text*."""
        if self.OWN_FILTER:
            self._text = filter_text
            self.show()
        else:
            self.host.filter_ranks(filter_text)

    @on(Table.Chosen, "#ranks, #flights")
    def _open_rank_of_row(self, event: Table.Chosen) -> None:
        row: Any = event.table.current
        if row is not None:
            self.host.open_rank(row.rank)

    @on(Table.ColumnsWanted)
    def _open_column_chooser(self, event: Table.ColumnsWanted) -> None:
        self.app.push_screen(ColumnChooser(event.table))

    @on(Input.Changed, "#filter")
    def _filter_as_typed(self, event: Input.Changed) -> None:
        if event.input.display:
            self.filter(event.value)

    @on(Input.Submitted, "#filter")
    def _entered(self, event: Input.Submitted) -> None:
        self._close(event.input)

    def _close(self, entry: Input) -> None:
        entry.display = False
        self.filter(entry.value)
        self.focus_body()

    def focus_body(self) -> None:
        """Focuses the widget that the screen's keys belong to."""
        self.set_focus(self.query_one(self.FOCUS) if self.FOCUS else None)


def why_no_rank(model: ViewModel) -> str:
    """Why no rank is shown."""
    return "no rank matches the filter" if model.rank_filter else "no rank has reported yet"


def _tab_row(shown_tab: str, model: ViewModel, width: int) -> Line:
    finding_count = len(model.run.findings)
    short = width < 100
    spans: Line = []
    for number, name in enumerate(TABS, 1):
        title = {"communication": "Comm"}.get(name, name.capitalize()) if short else name.capitalize()
        count = f" {finding_count}" if name == "findings" and finding_count else ""
        spans.append((f" {number} {title}{count} ", "badge" if name == shown_tab else "dim"))
    return spans


# ---- dialogs over a screen ----------------------------------------------------------------------


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


RUNS: Columns[RunChoice] = (
    Column("run", lambda r: r.run, TEXT, 28, tone="bold"),
    Column(
        "state", lambda r: r.state, TEXT, 31, tone=lambda _, r: "" if r.address else "dim", grows=True
    ),
    Column("command", lambda r: r.command, TEXT, 60, 1, tone="dim", ends=True),
)


class TableDialog(ModalScreen[ScreenResultType]):
    """A table over a screen, with a title and the keys of it."""

    def __init__(self, title: str, keys: str, table: Table[Any], rows: Sequence[Any]) -> None:
        super().__init__()
        self._title, self._keys, self._table, self._rows = title, keys, table, rows

    def compose(self) -> ComposeResult:
        """The table."""
        with Vertical(id="dialog") as box:
            box.border_title, box.border_subtitle = self._title, self._keys
            yield self._table

    def on_mount(self) -> None:
        """Fills the table."""
        self._table.focus()
        self._table.show(self._rows)


class Runs(TableDialog["RunChoice | None"]):
    """Live and recorded runs; Enter opens one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,r", "dismiss(None)", "Cancel")]

    def __init__(self, choices: tuple[RunChoice, ...]) -> None:
        table = Table(
            RUNS, lambda run: (run.run, run.address), id="runs", empty="no run is known", classes=""
        )
        super().__init__("runs", "enter: open   esc: cancel", table, choices)

    @on(Table.Chosen)
    def _chosen(self) -> None:
        self.dismiss(self._table.current)


class ColumnChooser(TableDialog[None]):
    """The columns of a table: Enter or space shows or hides the one under the cursor, at once."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,C", "dismiss(None)", "Close"),
        Binding("space", "turn_over", "Show or hide"),
    ]

    def __init__(self, of: Table[Any]) -> None:
        self._of = of
        columns: Columns[Column[Any]] = (
            Column("shown", lambda c: c.name in of.hidden, TEXT, 7, tone="accent", left=False,
                   show=lambda c: "" if c.name in of.hidden else "x"),
            Column("column", lambda c: c.name, TEXT, 20, tone="bold", grows=True),
        )  # fmt: skip
        table = Table(columns, lambda column: column.name, id="columns", classes="")
        super().__init__("columns", "enter: show or hide   esc: close", table, of.columns)

    @on(Table.Chosen)
    def action_turn_over(self) -> None:
        """Shows or hides the column under the cursor; one column always stays."""
        column: Column[Any] | None = self._table.current
        if column is not None:
            hidden = self._of.hidden ^ {column.name}
            if len(hidden) < len(self._of.columns):
                self._of.hide_columns(hidden)
            self._table.show(self._of.columns)
