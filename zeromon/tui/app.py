"""The app: asks its source once a second in a thread of its own, and shows the newest picture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import Footer, Static

from zeromon.capture import is_open, progress
from zeromon.errors import RunNotFound, ZeromonError
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.source import LiveSource, Source
from zeromon.tui import renderables
from zeromon.tui.details import Details
from zeromon.tui.messages import SnapshotArrived, SourceFailed, Told
from zeromon.tui.widgets.chart import Chart
from zeromon.tui.widgets.ranks import Ranks

_TRACED_STEPS = 2

_ORDERS: tuple[tuple[str, Callable[[RankSnapshot], float]], ...] = (
    ("rank", lambda rank: rank.rank),
    ("exposed", lambda rank: -(rank.exposed_ratio or 0.0)),
    ("risk", lambda rank: -max((risk.ratio for risk in rank.risks), default=0.0)),
)


class ZeromonApp(App[int]):
    """The live view of one run."""

    TITLE = "zeromon"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #header, #risk { height: 1; }
    #charts { height: 1fr; min-height: 6; max-height: 24; }
    #ranks { margin: 0 1; }
    #findings { height: auto; max-height: 6; border-top: solid $panel-lighten-2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("space", "pause", "Pause"),
        Binding("s", "sort", "Sort ranks"),
        Binding("u", "units", "Units"),
        Binding("f", "findings", "Findings"),
        Binding("c", "config", "Config"),
        Binding("t", "trace", "Trace"),
        Binding("ctrl+c", "quit", show=False),
    ]

    def __init__(self, source: Source, every_seconds: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._every_seconds = every_seconds
        self._stopping = threading.Event()
        self._paused = False
        self._order = 0
        self._stale = ""
        self._trace_told: tuple[int, str] | None = None
        self.run_shown: RunSnapshot | None = None

    def compose(self) -> ComposeResult:
        """Header, risk, charts, ranks, findings, keys."""
        yield Static(" zeromon  waiting for the first picture", id="header")
        yield Static("", id="risk")
        with Horizontal(id="charts"):
            yield Chart("exposed, % of a step", id="exposed")
            yield Chart("memory, GiB", id="memory")
        yield Ranks(id="ranks")
        yield Static("", id="findings")
        yield Footer()

    def on_mount(self) -> None:
        """Starts to ask."""
        self.query_one(Ranks).focus()
        threading.Thread(target=self._ask, name="source", daemon=True).start()

    def on_unmount(self) -> None:
        """Stops asking."""
        self._stopping.set()

    def _ask(self) -> None:
        """In a thread: never touches a widget, only posts."""
        while not self._stopping.is_set():
            try:
                run = self._source.latest()
                self.post_message(SnapshotArrived(run))
                if run.ended:
                    return
            except RunNotFound:
                self.post_message(SourceFailed("the run has ended: zeromon report"))
                return
            except ZeromonError as error:
                self.post_message(SourceFailed(str(error)))
            self._stopping.wait(self._every_seconds)

    def on_snapshot_arrived(self, message: SnapshotArrived) -> None:
        """Shows it, unless paused."""
        self._stale = ""
        self._tell_trace(message.run)
        if not self._paused:
            self.run_shown = message.run
            self._show()

    def on_source_failed(self, message: SourceFailed) -> None:
        """Says that what is shown is old."""
        self._stale = message.reason
        self._show()

    def on_resize(self) -> None:
        """Lines are cut to the width, so they are made anew."""
        self.call_after_refresh(self._show)

    def action_pause(self) -> None:
        """Holds the picture, or lets it go on."""
        self._paused = not self._paused
        self._show()

    def action_sort(self) -> None:
        """Orders the ranks by the next of rank, exposed share, OOM risk."""
        self._order = (self._order + 1) % len(_ORDERS)
        self._show()

    def action_config(self) -> None:
        """Shows the configuration, the engines, and where the bytes are."""
        self.push_screen(Details(lambda: self.run_shown, renderables.details))

    def action_findings(self) -> None:
        """Shows every finding with its way out."""
        self.push_screen(Details(lambda: self.run_shown, renderables.findings_page))

    def action_units(self) -> None:
        """Shows what communicates, by unit and bucket."""
        self.push_screen(Details(lambda: self.run_shown, renderables.communication))

    def action_trace(self) -> None:
        """Asks for a trace of the next steps of all ranks; its progress is shown as it comes."""
        if not isinstance(self._source, LiveSource):
            self.notify("a trace needs a live run", severity="warning")
            return
        threading.Thread(target=self._ask_trace, args=(self._source,), daemon=True).start()

    def _ask_trace(self, source: LiveSource) -> None:
        try:
            source.trace(_TRACED_STEPS)
        except ZeromonError as error:
            self.post_message(Told(str(error), "warning"))

    def on_told(self, message: Told) -> None:
        """Says it in a corner of the screen."""
        self.notify(message.text, severity=message.severity, markup=False)

    def _tell_trace(self, run: RunSnapshot) -> None:
        """Says when a trace has come further; not what was over before the view was opened."""
        made = run.capture
        if made is None:
            return
        before, self._trace_told = self._trace_told, (made.number, made.state)
        if before == self._trace_told or (before is None and not is_open(made)):
            return
        if made.state == "done":
            text = f"trace {made.number}: {len(made.files)} files in {made.folder}"
        elif made.state == "failed":
            text = f"trace {made.number} failed: {made.note}"
        else:
            text = progress(made, max((rank.step for rank in run.ranks), default=0))
        self.post_message(Told(text, "warning" if made.state == "failed" else "information"))

    def _show(self) -> None:
        run, width = self.run_shown, self.size.width
        if not self.query(Ranks):
            return  # a message that came after the screen went
        if run is None:
            if self._stale:
                self.query_one("#header", Static).update(f" zeromon  {self._stale}")
            return
        top = renderables.header(run, width, paused=self._paused, stale=self._stale)
        self.query_one("#header", Static).update(top)
        self.query_one("#risk", Static).update(renderables.risk_line(run, width))
        self.query_one("#exposed", Chart).show(renderables.exposed_series(run))
        title = renderables.memory_title(run)
        self.query_one("#memory", Chart).show(renderables.memory_series(run), title)
        name, key = _ORDERS[self._order]
        ranks = self.query_one(Ranks)
        ranks.border_title = f"by {name}"
        ranks.styles.height = min(len(run.ranks) + 1, max(4, self.size.height // 2))
        ranks.show(tuple(sorted(run.ranks, key=key)))
        most = 5 if self.size.height >= 30 else 3
        self.query_one("#findings", Static).update(renderables.findings(run, width, most))
