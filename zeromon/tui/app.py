"""The app: what is looked at, and what every key does; pictures come from a thread of their own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from textual.app import App, ScreenStackError, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from zeromon import report
from zeromon.errors import ZeromonError
from zeromon.fleet.source import PrometheusSource
from zeromon.snapshot import FleetNode, RankSnapshot, RunSnapshot
from zeromon.source import LiveSource, Source, StoreSource, node_runs
from zeromon.store import Store
from zeromon.tui.export import csv_text, save, without_fonts
from zeromon.tui.feed import Feed, Reconnect
from zeromon.tui.line import clean
from zeromon.tui.look import WHOLE, WINDOWS, Look
from zeromon.tui.marks import Mark, Marks
from zeromon.tui.messages import Arrived, Choices, RunChoice, RunGone, SourceFailed, Told
from zeromon.tui.notes import Note, changes, opening
from zeromon.tui.playhead import Playhead, Span, stride
from zeromon.tui.plots import Trends, steps_of, telling
from zeromon.tui.scene import Scene
from zeromon.tui.screens.communication import Communication
from zeromon.tui.screens.dialogs import Prompt, Runs
from zeromon.tui.screens.findings import Findings
from zeromon.tui.screens.help import keys, sign
from zeromon.tui.screens.logs import Logs
from zeromon.tui.screens.memory import Memory
from zeromon.tui.screens.overview import Overview
from zeromon.tui.screens.rank import RankView
from zeromon.tui.screens.ranks import Ranks
from zeromon.tui.screens.text import TextScreen, configuration
from zeromon.tui.screens.timeline import Lanes, Timeline
from zeromon.tui.screens.view import TABS, View
from zeromon.tui.tones import THEMES
from zeromon.tui.wanted import test_of
from zeromon.tui.widgets.table import Table
from zeromon.tui.words import clock, worst_risk

_TRACED_STEPS = 2
_MOST_NOTES = 2000
_SCREENS = (Overview, Memory, Communication, Timeline, Ranks, Findings, Logs)
_OWN_THEMES = (*(theme.name for theme in THEMES), "ansi-dark", "ansi-light")


class ZeromonApp(App[int]):
    """The view of one run, live or recorded."""

    TITLE = "zeromon"
    CSS_PATH = "zeromon.tcss"
    MODES = {screen.TAB: screen for screen in _SCREENS}  # noqa: RUF012
    DEFAULT_MODE = "overview"
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-narrow"), (110, "-normal"), (180, "-wide"),
    ]  # fmt: skip
    VERTICAL_BREAKPOINTS = [(0, "-low"), (32, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"switch('{name}')", name.capitalize(), show=False)
            for number, name in enumerate(TABS, 1)
        ),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("space", "pause", "Pause"),
        Binding("left", "seek(-1)", "Back in time", show=False),
        Binding("right", "seek(1)", "Forth in time", show=False),
        Binding("shift+left", "seek(-10)", "Far back", show=False),
        Binding("shift+right", "seek(10)", "Far forth", show=False),
        Binding("l", "follow", "To the newest", show=False),
        Binding("less_than_sign", "speed(-1)", "Replay slower", show=False),
        Binding("greater_than_sign", "speed(1)", "Replay faster", show=False),
        Binding("left_square_bracket", "rank(-1)", "The rank before", show=False),
        Binding("right_square_bracket", "rank(1)", "The next rank", show=False),
        Binding("a", "rank(0)", "The rank that matters most", show=False),
        Binding("t", "trace", "Trace"),
        Binding("m", "mark", "Mark"),
        Binding("w", "window", "Window", show=False),
        Binding("u", "units", "Units: GiB or GB", show=False),
        Binding("percent_sign", "shares", "Shares, or time and bytes", show=False),
        Binding("x", "csv", "Table as CSV", show=False),
        Binding("p", "picture", "Screen as SVG", show=False),
        Binding("r", "runs", "Runs", show=False),
        Binding("c", "configuration", "Configuration", show=False),
        Binding("R", "report", "Report", show=False),
        Binding("T", "next_theme", "Next theme", show=False),
        Binding("ctrl+c", "quit", show=False),
    ]

    def __init__(
        self,
        source: Source,
        *,
        every_seconds: float = 1.0,
        look: Look | None = None,
        theme: str = "",
        store: Store | None = None,
        reconnect: Callable[[str, bool], Source | None] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        no_color = "NO_COLOR" in os.environ  # as Textual reads it
        super().__init__(ansi_color=True if no_color else None)
        for own in THEMES:
            self.register_theme(own)
        plain = no_color or self.console.color_system in ("standard", None)
        self.theme = theme or ("ansi-dark" if plain else THEMES[0].name)
        self.now = now
        self.look = replace(look or Look(), letters=no_color)
        self.wanted = ""
        self.trouble = ""
        self.scene: Scene | None = None
        self._store = store or Store()
        self._every_seconds = every_seconds
        self._reconnect = reconnect
        self._chosen: int | None = None
        self._node = ""
        self._trends = Trends()
        self._begin(source)

    def _begin(self, source: Source) -> None:
        """Turns to a run: nothing of another is left."""
        again: Reconnect | None = None
        if self._reconnect is not None and isinstance(source, LiveSource):
            find, name = self._reconnect, source.run
            again = lambda gone: find(name, gone)  # noqa: E731
        self._head = Playhead(source)
        self._feed = Feed(self._head, self.post_message, self._every_seconds, again)
        self._last: Arrived | None = None
        self._newest: RunSnapshot | None = None
        self._moment: RunSnapshot | None = None
        self._span: Span | None = None
        self._first: RunSnapshot | None = None
        self._opening: tuple[Note, ...] = ()
        self._news: tuple[Note, ...] = ()
        self._marks = Marks(None)
        self._was_live = False
        self._chosen, self._trends, self.scene, self.trouble = None, Trends(), None, ""
        self._node = ""

    def on_mount(self) -> None:
        """Begins to ask, and to say how old the picture is."""
        self._feed.start()
        self.set_interval(1.0, self._show_age)

    def on_unmount(self) -> None:
        """Stops asking."""
        self._feed.stop()

    # ---- what comes ------------------------------------------------------------------------------

    def on_arrived(self, message: Arrived) -> None:
        """Shows it, and notes what has changed."""
        if message.head is not self._head or self._says_nothing_new(message):
            return
        self.trouble, self._span = "", message.span
        before, self._newest = self._newest, message.newest
        if before is None:
            self._marks = Marks(self._store.folder(message.newest.run))
        self._note(before, message)
        self._trends.whole = steps_of(message.series) if message.series is not None else {}
        # the playhead may have been moved on since
        self._moment = message.moment if self._head.wall is not None else None
        self._follow_to_the_end(message.newest)
        self._look_closer()
        self.refresh_scene()

    def _says_nothing_new(self, message: Arrived) -> bool:
        """A source that is asked more often than it has pictures costs no drawing."""
        last, self._last = self._last, message
        if last is None or self.trouble or last.head is not message.head:
            return False
        return (
            _moment_of(last.newest) == _moment_of(message.newest)
            and _moment_of(last.moment) == _moment_of(message.moment)
            and last.span == message.span
            and last.series is message.series
            and last.past is message.past
        )

    def _note(self, before: RunSnapshot | None, message: Arrived) -> None:
        if before is None:
            self._first = message.newest
        if self._first is not None and (before is None or message.past is not None):
            self._opening = opening(self._first, message.past or ())
            self._first = None if message.past is not None else self._first
        # a replay may have gone back: what it says anew is not news
        forth = before is not None and message.newest.taken_wall > before.taken_wall
        fresh = changes(before, message.newest) if forth else []
        self._news = (*self._news, *fresh)[-_MOST_NOTES:]
        for note in fresh:
            if note.text.startswith("trace ") and note.tone:  # the first line shows how far it is
                self.notify(note.text, severity="warning" if note.tone == "warn" else "information",
                            markup=False)  # fmt: skip

    def _follow_to_the_end(self, run: RunSnapshot) -> None:
        """A run that was seen alive, and has ended, shows its report."""
        if run.ended and self._was_live and self._head.replay is None:
            self._was_live = False
            self.action_report()
        elif not run.ended:
            self._was_live = True

    def on_source_failed(self, message: SourceFailed) -> None:
        """What is shown is old, and why."""
        self.trouble = message.reason
        self.refresh_scene()

    def on_run_gone(self, message: RunGone) -> None:
        """The collector has forgotten the run."""
        self.trouble = "the run has ended: zeromon report" if self._newest else message.reason
        self.refresh_scene()

    def on_told(self, message: Told) -> None:
        """Says it in a corner of the screen."""
        self.notify(message.text, severity=message.severity, markup=False)

    def refresh_scene(self) -> None:
        """Makes the scene anew, and has it shown."""
        run = self._moment or (self._newest if self._head.wall is None else None)
        if run is None and self.scene is not None:
            run = self.scene.run  # held
        newest = self._newest
        if run is not None and newest is not None:
            self.scene = Scene(
                run=run, ranks=self._let_through(run), look=self.look, trends=self._trends,
                marks=tuple(self._marks.all), notes=self._opening + self._news, wanted=self.wanted,
                chosen=self._chosen, newest_wall=newest.taken_wall, span=self._span,
                paused=self._head.paused, replay=self._head.replay is not None,
                speed=self._head.speed, trouble=self.trouble,
            )  # fmt: skip
        view = self._view()
        if view is not None:
            view.show()

    def _view(self) -> View | None:
        """The screen on top; None for a dialog, or when the app is closing."""
        with suppress(ScreenStackError):
            return self.screen if isinstance(self.screen, View) else None
        return None

    def _let_through(self, run: RunSnapshot) -> tuple[RankSnapshot, ...]:
        test = test_of(self.wanted)
        return run.ranks if test is None else tuple(rank for rank in run.ranks if test(rank))

    def _show_age(self) -> None:
        view = self._view()
        if view is not None:
            view.show_age()

    # ---- where and when ----------------------------------------------------------------------------

    def action_switch(self, name: str) -> None:
        """Opens a screen."""
        self.switch_mode(name)

    def action_pause(self) -> None:
        """Holds the picture, or lets it go on."""
        if self.scene is not None:
            self._head.toggle(self.scene.run.taken_wall)
            self._moment = self.scene.run if self._head.wall is not None else None
            self._moved()

    def action_seek(self, steps: int) -> None:
        """Goes back or forth in what is kept of the run."""
        if self.scene is None:
            return
        shown = self._head.wall if self._head.wall is not None else self.scene.run.taken_wall
        if not self._head.move(shown, steps * stride(self._span), self._span):
            self.notify("nothing of this run is kept to go back to", severity="warning")
        self._moved()

    def action_follow(self) -> None:
        """Shows the newest picture again."""
        self._head.follow()
        self._moved()

    def action_speed(self, by: int) -> None:
        """Lets a replay go faster or slower."""
        if not self._head.faster(by):
            self.notify("only a replay has a speed: zeromon replay RUN", severity="warning")
        self._moved()

    def _moved(self) -> None:
        self._feed.wake()
        self.refresh_scene()

    def action_rank(self, by: int) -> None:
        """The rank that screens of one rank show; 0: they choose by themselves."""
        if self.scene is None or not self.scene.ranks:
            return
        numbers = [rank.rank for rank in self.scene.ranks]
        if not by:
            self._chosen = None
        elif self._chosen in numbers:
            self._chosen = numbers[(numbers.index(self._chosen) + by) % len(numbers)]
        else:
            self._chosen = numbers[0 if by > 0 else -1]
        self._look_closer()
        self.refresh_scene()

    def open_rank(self, rank: int) -> None:
        """Shows everything of a rank."""
        self._chosen = rank
        self._look_closer()
        self.refresh_scene()
        self.push_screen(RankView())

    def open_node(self, node: FleetNode) -> None:
        """Shows the ranks of a node of a large run."""
        self.want(node.node)
        self._node = node.address
        self._look_closer()
        self._feed.wake()

    def _look_closer(self) -> None:
        """Has a source that does not read all ranks read those that are looked at."""
        source = self._head.source
        if isinstance(source, PrometheusSource):
            source.want([] if self._chosen is None else [self._chosen], self._node)

    def want(self, text: str) -> None:
        """Filters ranks."""
        if text != self.wanted:
            self._node = ""
            self.wanted, whole = text, self._trends.whole
            self._trends = Trends(whole=whole)  # bands are of the ranks that are let through
            self.refresh_scene()

    # ---- how ---------------------------------------------------------------------------------------

    def action_units(self) -> None:
        """GiB, or GB."""
        self._look_anew(replace(self.look, decimal=not self.look.decimal))

    def action_shares(self) -> None:
        """Shares of a step and of a limit, or time and bytes."""
        self._look_anew(replace(self.look, shares=not self.look.shares))
        shown = (
            "shares of a step, and of a limit that is known"
            if self.look.shares
            else "time and bytes"
        )
        self.notify(f"charts show {shown}", timeout=2)

    def action_window(self) -> None:
        """How many steps charts show."""
        window = WINDOWS[(WINDOWS.index(self.look.window) + 1) % len(WINDOWS)]
        self._look_anew(replace(self.look, window=window))
        self._trends.whole = {}
        whole = window == WHOLE and self.scene is not None
        self._feed.series_of = (
            telling(self.scene.ranks, self._chosen) if whole and self.scene else None
        )
        self._feed.wake(wholly=whole)
        names = {0: "as many steps as fit", WHOLE: "the whole run"}
        self.notify(f"charts show {names.get(window, f'{window} steps')}", timeout=2)

    def _look_anew(self, look: Look) -> None:
        self.look = look
        self.refresh_scene()

    def action_next_theme(self) -> None:
        """The next of zeromon's themes; the palette has all."""
        at = _OWN_THEMES.index(self.theme) if self.theme in _OWN_THEMES else -1
        self.theme = _OWN_THEMES[(at + 1) % len(_OWN_THEMES)]

    def watch_theme(self) -> None:
        """Tones are drawn anew."""
        if self.is_running:
            self.call_after_refresh(self.refresh_scene)

    # ---- what it does ------------------------------------------------------------------------------

    def action_trace(self) -> None:
        """Asks for a trace of the next steps of all ranks; the first line shows how far it is."""
        source = self._head.source
        if not isinstance(source, LiveSource):
            self.notify("a trace needs a live run", severity="warning")
            return
        self._in_thread(lambda: source.trace(_TRACED_STEPS))

    def _in_thread(self, do: Callable[[], object]) -> None:
        def run() -> None:
            try:
                do()
            except ZeromonError as error:
                self.post_message(Told(str(error), "warning"))

        threading.Thread(target=run, daemon=True).start()

    def action_mark(self) -> None:
        """Marks the moment that is shown."""
        if self.scene is None:
            return
        wall = self.scene.run.taken_wall
        step = max((rank.step for rank in self.scene.run.ranks), default=0)

        def keep(text: str | None) -> None:
            if text is None:
                return
            kept = self._marks.add(Mark(wall, step, text))
            where = f"in {self._marks.path}" if kept else "as long as this view is open"
            self.notify(f"step {step} is marked, {where}", markup=False)
            self.refresh_scene()

        title = f"mark {clock(wall)}, step {step}"
        self.push_screen(Prompt(title, "what happened? (may be empty)"), keep)

    def action_csv(self) -> None:
        """Writes the screen's table to a file."""
        if self.scene is None or not isinstance(self.screen, View):
            return
        sheet = self.screen.sheet(self.scene)
        if sheet is None:
            self.notify("this screen has no table", severity="warning")
        else:
            self._save(csv_text(sheet), sheet.name, ".csv")

    def action_picture(self) -> None:
        """Writes the screen to a file, without what was said on top of it."""
        self.clear_notifications()
        self.call_later(self.screen.call_after_refresh, self._picture)

    def _picture(self) -> None:
        self._save(without_fonts(self.export_screenshot()), str(self.current_mode), ".svg")

    def _save(self, text: str, what: str, suffix: str) -> None:
        run = self.scene.run.run if self.scene is not None else "run"
        try:
            self.notify(f"written: {save(text, run, what, suffix)}", markup=False)
        except OSError as error:
            self.notify(f"cannot write: {error}", severity="warning", markup=False)

    def action_runs(self) -> None:
        """Offers the runs of this machine."""
        self._in_thread(lambda: self.post_message(Choices(_choices(self._store))))

    def on_choices(self, message: Choices) -> None:
        """Shows them."""
        self.push_screen(Runs(message.runs), self._turn_to)

    def _turn_to(self, choice: RunChoice | None) -> None:
        if choice is None:
            return
        try:
            source = _opened(choice, self._store)
        except ZeromonError as error:
            self.notify(str(error), severity="warning", markup=False)
            return
        self._feed.stop()
        self._begin(source)
        self._feed.start()
        self.refresh_scene()

    def action_configuration(self) -> None:
        """Engines, roles, offload, and every setting."""
        self.push_screen(TextScreen("configuration", configuration))

    def action_report(self) -> None:
        """The run as `zeromon report` prints it."""
        self.push_screen(TextScreen("report", lambda scene: report.render(scene.run)))

    def action_help(self) -> None:
        """Every key."""
        groups: list[tuple[str, Iterable[BindingType]]] = [
            ("everywhere", [*self.BINDINGS, View.BINDINGS[0], *_PALETTE_KEY]),
            ("in a table", Table.BINDINGS), ("timeline", Lanes.BINDINGS),
            ("communication", Communication.BINDINGS), ("ranks", Ranks.BINDINGS),
            ("findings", Findings.BINDINGS),
        ]  # fmt: skip
        self.push_screen(TextScreen("keys", lambda _scene: keys(groups)))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Every key's action, those of the screen too, and the rank that matters most."""
        yield SystemCommand("Theme", "choose among all themes", self.action_change_theme)
        for owner, prefix in ((self, "app"), (screen, "screen")):
            for binding in type(owner).BINDINGS:
                if isinstance(binding, Binding) and binding.description:
                    action = f"{prefix}.{binding.action}"
                    yield SystemCommand(
                        binding.description, f"key {sign(binding.key)}", partial(self._run, action)
                    )
        worst = worst_risk(self.scene.ranks) if self.scene is not None else None
        if worst is not None:
            open_it = partial(self.open_rank, worst[0].rank)
            yield SystemCommand(f"Rank {worst[0].rank}", "the closest to its limit", open_it)

    def _run(self, action: str) -> None:
        self.run_worker(self.run_action(action))


def _moment_of(run: RunSnapshot | None) -> tuple[float, int, bool] | None:
    """What tells a picture from the next one of its run."""
    return None if run is None else (run.taken_wall, run.taken_ns, run.ended)


_PALETTE_KEY = (Binding("ctrl+p", "command_palette", "Every command, by name"),)


def _opened(choice: RunChoice, store: Store) -> Source:
    if choice.address:
        return LiveSource(choice.address, choice.run)
    return StoreSource(choice.run, store)


def _choices(store: Store) -> tuple[RunChoice, ...]:
    """Live runs, then recorded ones."""
    live = [
        RunChoice(
            run.run, "ended" if run.ended else f"live, step {run.steps}", clean(" ".join(run.command)),
            run.address,
        )
        for run in node_runs()
    ]  # fmt: skip
    known = {choice.run for choice in live}
    kept = [
        RunChoice(one.run, clean(one.verdict), clean(" ".join(one.command)), "")
        for one in store.manifests()
        if one.run not in known
    ]
    return (*live, *kept)
