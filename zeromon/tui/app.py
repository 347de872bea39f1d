"""The terminal application: one run, its screens and its keys. A thread reads the snapshots."""

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
from textual.notifications import SeverityLevel
from textual.screen import Screen

from zeromon.base.errors import ZeromonError
from zeromon.readout.report import render_run
from zeromon.readout.verdict import Verdict, judge_run
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.focus import nearest_oom
from zeromon.snapshot.levels import Severity
from zeromon.snapshot.run import FleetNode
from zeromon.sources.base import Source
from zeromon.storage.run_store import Store
from zeromon.tui import feed
from zeromon.tui.columns import (
    WHOLE_RUN,
    WINDOWS,
    DisplayOptions,
    csv_text,
    parse_rank_filter,
    save_new_file,
    svg_without_fonts,
)
from zeromon.tui.event_log import Mark, Marks
from zeromon.tui.line import clean
from zeromon.tui.plots import Trends, steps_by_rank, telling_ranks
from zeromon.tui.screens.communication import Communication
from zeromon.tui.screens.findings import Findings
from zeromon.tui.screens.help import list_all_keys, sign
from zeromon.tui.screens.logs import Logs
from zeromon.tui.screens.memory import Memory
from zeromon.tui.screens.overview import Overview
from zeromon.tui.screens.rank import RankView
from zeromon.tui.screens.ranks import Ranks
from zeromon.tui.screens.text import TextScreen, configuration_text, trace_analysis_text
from zeromon.tui.screens.timeline import Timeline
from zeromon.tui.screens.view import TABS, Prompt, Runs, View
from zeromon.tui.status_text import clock
from zeromon.tui.styles import THEMES
from zeromon.tui.view_model import ViewModel

_TRACED_STEPS = 2
_SCREENS = (Overview, Memory, Communication, Timeline, Ranks, Findings, Logs)
_OWN_THEMES = (*(theme.name for theme in THEMES), "ansi-dark", "ansi-light")


class ZeromonApp(App[int]):
    """One run, live or recorded; the :class:`~zeromon.tui.screens.view.Host` of its screens."""

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
        Binding("left", "seek(-1)", "Previous snapshot", show=False),
        Binding("right", "seek(1)", "Next snapshot", show=False),
        Binding("shift+left", "seek(-10)", "Jump back", show=False),
        Binding("shift+right", "seek(10)", "Jump forward", show=False),
        Binding("l", "follow", "Newest snapshot", show=False),
        Binding("less_than_sign", "speed(-1)", "Replay slower", show=False),
        Binding("greater_than_sign", "speed(1)", "Replay faster", show=False),
        Binding("left_square_bracket", "rank(-1)", "Previous rank", show=False),
        Binding("right_square_bracket", "rank(1)", "Next rank", show=False),
        Binding("a", "rank(0)", "Most important rank", show=False),
        Binding("t", "trace", "Trace"),
        Binding("m", "mark", "Mark"),
        Binding("w", "window", "Window", show=False),
        Binding("percent_sign", "shares", "Shares, or time and bytes", show=False),
        Binding("x", "csv", "Save table as CSV", show=False),
        Binding("p", "save_screen", "Save screen as SVG", show=False),
        Binding("r", "runs", "Runs", show=False),
        Binding("c", "configuration", "Configuration", show=False),
        Binding("R", "report", "Report", show=False),
        Binding("A", "analysis", "Analysis of the last trace", show=False),
        Binding("T", "next_theme", "Next theme", show=False),
        Binding("ctrl+c", "quit", show=False),
    ]

    def __init__(
        self,
        source: Source,
        *,
        every_seconds: float = 1.0,
        options: DisplayOptions | None = None,
        theme: str = "",
        store: Store | None = None,
        reconnect: Callable[[str, bool], Source | None] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        no_color = "NO_COLOR" in os.environ  # as Textual reads it
        # With RGB colours, Textual answers NO_COLOR with shades of grey; with ANSI ones it drops all
        super().__init__(ansi_color=True if no_color else None)
        for own_theme in THEMES:
            self.register_theme(own_theme)
        ansi_only = no_color or self.console.color_system in ("standard", None)
        self.theme = theme or ("ansi-dark" if ansi_only else THEMES[0].name)
        self.now = now
        self.look = replace(options or DisplayOptions(), letters=no_color)
        self.rank_filter = ""
        self._store = store or Store()
        self._every_seconds = every_seconds
        self._reconnect = reconnect
        self._open(source)

    def _open(self, source: Source) -> None:
        """Turns to the run of *source*; forgets everything about another run."""
        reconnect: feed.Reconnect | None = None
        if self._reconnect is not None and source.relocatable:
            reconnect = partial(self._reconnect, source.run)
        self._head = feed.Playhead(source)
        self._feed = feed.Feed(self._head, self.post_message, self._every_seconds, reconnect)
        self._known: feed.ObservedRun | None = None
        self._judged: Verdict | None = None
        self._marks = Marks(None)
        self._was_live = False
        self._chosen: int | None = None
        self._node = ""
        self._trends = Trends()
        self.model: ViewModel | None = None
        self.trouble = ""

    def on_mount(self) -> None:
        """Starts to read snapshots, and to show how old the newest one is."""
        self._write_to_terminal(KEEP_TITLE)
        self._feed.start()
        self.set_interval(1.0, self._show_snapshot_age)

    def on_unmount(self) -> None:
        """Stops reading snapshots."""
        self._feed.stop()
        self._write_to_terminal(RESTORE_TITLE)

    def _write_to_terminal(self, sequence: str) -> None:
        """Writes what only the terminal reads; nothing where there is none."""
        if sequence and self._driver is not None and not self._driver.is_headless:
            self._driver.write(sequence)

    # ---- messages ---------------------------------------------------------------------------------

    def on_snapshot_arrived(self, message: feed.SnapshotArrived) -> None:
        """Shows the snapshot, and adds what has changed to the log."""
        if message.head is not self._head:
            return
        previous, state = self._known, feed.fold_feed_message(self._known, message)
        # After a failure, the same snapshot is drawn again: the warning in the first line must go
        if state is previous and not self.trouble:
            return
        self.trouble = ""
        if previous is None:
            self._marks = Marks(self._store.folder(state.last.newest.run))
        if previous is None or state.last.series is not previous.last.series:
            self._trends.whole = (
                steps_by_rank(state.last.series) if state.last.series is not None else {}
            )
        if state is not previous:
            # Announces how a trace ended; its progress is in the first line.
            for entry in state.fresh:
                if entry.text.startswith("trace ") and entry.tone:
                    severity: SeverityLevel = "warning" if entry.tone == "warn" else "information"
                    # As markup, Textual would swallow [...] in a path or in a name of the run
                    self.notify(entry.text, severity=severity, markup=False)
        # the playhead may have moved since the thread read the snapshots
        self._known = state if self._head.wall is not None else replace(state, moment=None)
        judged = judge_run(state.last.newest)
        self._write_to_terminal(verdict_announcement(state.last.newest.run, judged, self._judged))
        self._judged = judged
        # Opens the report of a run that ended while this view was open
        if state.last.newest.ended and self._was_live and self._head.replay is None:
            self._was_live = False
            self.action_report()
        elif not state.last.newest.ended:
            self._was_live = True
        self._request_rank_detail()
        self.refresh_view_model()

    def on_source_failed(self, message: feed.SourceFailed) -> None:
        """Shows why there is no newer snapshot."""
        is_over = message.is_gone and self._known is not None
        self.trouble = "the run has ended: zeromon report" if is_over else message.reason
        self.refresh_view_model()

    def refresh_view_model(self) -> None:
        """Makes the view model anew, and draws it."""
        state, run = self._known, self._run_to_show()
        if state is not None and run is not None:
            test = parse_rank_filter(self.rank_filter)
            ranks = run.ranks if test is None else tuple(filter(test, run.ranks))
            self.model = ViewModel(
                run=run, ranks=ranks, look=self.look, trends=self._trends,
                marks=tuple(self._marks.all), log=state.entries, rank_filter=self.rank_filter,
                life=state.life,
                chosen=self._chosen, newest_wall=state.last.newest.taken_wall, span=state.last.span,
                paused=self._head.paused, replay=self._head.replay is not None,
                speed=self._head.speed, trouble=self.trouble,
            )  # fmt: skip
        view = self._view()
        if view is not None:
            view.show()

    def _run_to_show(self) -> RunSnapshot | None:
        """A recorded moment, the newest snapshot, or, while a moment is still read, what was shown."""
        if self._known is None:
            return None
        if self._known.moment is not None or self._head.wall is None:
            return self._known.moment or self._known.last.newest
        return self.model.run if self.model is not None else None

    def _view(self) -> View | None:
        with suppress(ScreenStackError):
            return self.screen if isinstance(self.screen, View) else None
        return None

    def _show_snapshot_age(self) -> None:
        view = self._view()
        if view is not None:
            view.show_snapshot_age()

    # ---- which moment, which rank -----------------------------------------------------------------

    def action_switch(self, name: str) -> None:
        """Opens a screen, without what lies over the present one."""
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.switch_mode(name)

    def action_pause(self) -> None:
        """Holds the snapshot that is shown, or follows the newest one again."""
        if self.model is not None and self._known is not None:
            self._head.toggle_pause(self.model.run.taken_wall)
            held_run = self.model.run if self._head.wall is not None else None
            self._known = replace(self._known, moment=held_run)
            self._moved()

    def action_seek(self, steps: int) -> None:
        """Shows an earlier or a later snapshot of the record."""
        if self.model is None:
            return
        span = self.model.span
        shown_wall = self._head.wall if self._head.wall is not None else self.model.run.taken_wall
        if not self._head.move(shown_wall, steps * feed.seconds_per_stride(span), span):
            self.notify("this run has no record to go back in", severity="warning")
        self._moved()

    def action_follow(self) -> None:
        """Shows the newest snapshot again."""
        self._head.follow()
        self._moved()

    def action_speed(self, by: int) -> None:
        """Makes a replay faster or slower."""
        if not self._head.change_replay_speed(by):
            self.notify("only a replay has a speed: zeromon attach RUN --replay", severity="warning")
        self._moved()

    def _moved(self) -> None:
        self._feed.read_at_once()
        self.refresh_view_model()

    def action_rank(self, by: int) -> None:
        """Chooses the rank that screens of one rank show; 0: each screen chooses by itself."""
        if self.model is None or not self.model.ranks:
            return
        numbers = [rank.rank for rank in self.model.ranks]
        if not by:
            self._chosen = None
        elif self._chosen in numbers:
            self._chosen = numbers[(numbers.index(self._chosen) + by) % len(numbers)]
        else:
            self._chosen = numbers[0 if by > 0 else -1]
        self._request_rank_detail()
        self.refresh_view_model()

    @property
    def source(self) -> Source:
        """Where the snapshots come from."""
        return self._head.source

    def open_rank(self, rank: int) -> None:
        """Opens the screen of one rank."""
        self._chosen = rank
        self._request_rank_detail()
        self.refresh_view_model()
        self.push_screen(RankView())

    def open_node(self, node: FleetNode) -> None:
        """Shows the ranks of one node of a large run."""
        self.filter_ranks(node.node)
        self._node = node.address
        self._request_rank_detail()
        self._feed.read_at_once()

    def _request_rank_detail(self) -> None:
        """Makes a source that does not read all ranks read those that are shown."""
        ranks = [] if self._chosen is None else [self._chosen]
        self._head.source.request_detail(ranks, self._node)

    def filter_ranks(self, filter_text: str) -> None:
        """Shows only the ranks that *filter_text* selects; see :mod:`zeromon.tui.columns`."""
        if filter_text != self.rank_filter:
            self._node = ""
            self.rank_filter = filter_text
            self._trends = Trends(whole=self._trends.whole)  # bands are of the ranks that are shown
            self.refresh_view_model()

    # ---- display options --------------------------------------------------------------------------

    def action_shares(self) -> None:
        """Switches between shares (of a step, of a limit) and time and bytes."""
        self._change_display_options(replace(self.look, shares=not self.look.shares))
        units = "shares of a step, and of a known limit" if self.look.shares else "time and bytes"
        self.notify(f"charts show {units}", timeout=2)

    def action_window(self) -> None:
        """Chooses how many steps charts show."""
        window = WINDOWS[(WINDOWS.index(self.look.window) + 1) % len(WINDOWS)]
        self._change_display_options(replace(self.look, window=window))
        # Steps of another choice of ranks must not be drawn until the feed has read the new ones
        self._trends.whole = {}
        is_whole = window == WHOLE_RUN and self.model is not None
        self._feed.series_of = (
            telling_ranks(self.model.ranks, self._chosen) if is_whole and self.model else None
        )
        self._feed.read_at_once(wholly=is_whole)
        names = {0: "as many steps as fit", WHOLE_RUN: "the whole run"}
        self.notify(f"charts show {names.get(window, f'{window} steps')}", timeout=2)

    def _change_display_options(self, options: DisplayOptions) -> None:
        self.look = options
        self.refresh_view_model()

    def action_next_theme(self) -> None:
        """Chooses the next of zeromon's themes; the palette offers all themes."""
        at = _OWN_THEMES.index(self.theme) if self.theme in _OWN_THEMES else -1
        self.theme = _OWN_THEMES[(at + 1) % len(_OWN_THEMES)]
        self.notify(f"theme {self.theme}", timeout=2)

    def watch_theme(self) -> None:
        """Draws everything in the new theme's colours."""
        # Textual also calls this from __init__, where no screen exists
        if self.is_running:
            self.call_after_refresh(self.refresh_view_model)

    # ---- actions ----------------------------------------------------------------------------------

    def action_trace(self) -> None:
        """Requests a trace of the next steps of all ranks; the first line shows its progress."""
        source = self._head.source
        self._start_in_thread(lambda: source.trace(_TRACED_STEPS))

    def _start_in_thread(self, do: Callable[[], object]) -> None:
        def run_and_announce() -> None:
            try:
                do()
            except ZeromonError as error:
                self.notify(error.told, severity="warning", markup=False)  # from any thread

        # A daemon: a collector that does not answer must not hold the process after q
        threading.Thread(target=run_and_announce, daemon=True).start()

    def action_mark(self) -> None:
        """Marks the moment that is shown, with a text of the user."""
        if self.model is None:
            return
        marked_wall = self.model.run.taken_wall
        step = self.model.run.last_step

        def keep_mark(description: str | None) -> None:
            if description is None:
                return
            is_stored = self._marks.add(Mark(marked_wall, step, description))
            location = f"in {self._marks.path}" if is_stored else "only until this view is closed"
            self.notify(f"step {step} is marked, {location}", markup=False)
            self.refresh_view_model()

        title = f"mark {clock(marked_wall)}, step {step}"
        self.push_screen(Prompt(title, "description (may be empty)"), keep_mark)

    def action_csv(self) -> None:
        """Writes the screen's table to a file."""
        if self.model is None or not isinstance(self.screen, View):
            return
        sheet = self.screen.sheet(self.model)
        if sheet is None:
            self.notify("this screen has no table", severity="warning")
        else:
            self._save(csv_text(sheet), sheet.name, ".csv")

    def action_save_screen(self) -> None:
        """Writes the screen to a file, without notifications."""
        # They leave the screen with its next refresh, so the picture waits for that
        self.clear_notifications()
        self.call_later(self.screen.call_after_refresh, self._save_screenshot)

    def _save_screenshot(self) -> None:
        self._save(svg_without_fonts(self.export_screenshot()), str(self.current_mode), ".svg")

    def _save(self, content: str, subject: str, suffix: str) -> None:
        run = self.model.run.run if self.model is not None else "run"
        try:
            self.notify(f"written: {save_new_file(content, run, subject, suffix)}", markup=False)
        except OSError as error:
            self.notify(f"cannot write: {error}", severity="warning", markup=False)

    def action_runs(self) -> None:
        """Opens the list of this machine's runs."""
        self._start_in_thread(
            lambda: self.post_message(feed.Choices(feed.list_run_choices(self._store)))
        )

    def on_choices(self, message: feed.Choices) -> None:
        """Shows the list of runs."""
        self.push_screen(Runs(message.runs), self._switch_to_run)

    def _switch_to_run(self, choice: feed.RunChoice | None) -> None:
        if choice is None:
            return
        try:
            source = choice.open(self._store)
        except ZeromonError as error:
            self.notify(str(error), severity="warning", markup=False)
            return
        self._feed.stop()
        self._open(source)
        self._feed.start()
        self.refresh_view_model()

    def action_configuration(self) -> None:
        """Opens the configuration: engines, roles, offload, and every setting."""
        self.push_screen(TextScreen("configuration", configuration_text))

    def action_report(self) -> None:
        """Opens the report, as `zeromon report --full` prints it."""
        past = self._known.last.past if self._known is not None else None
        self.push_screen(TextScreen("report", lambda model: render_run(model.run, past=past or ())))

    def action_analysis(self) -> None:
        """Opens the analysis of the last trace, as `zeromon trace capture` prints it."""
        self.push_screen(TextScreen("last trace", trace_analysis_text))

    def action_help(self) -> None:
        """Opens the list of all keys."""
        everywhere = [*self.BINDINGS, View.BINDINGS[0], *_PALETTE_KEY]
        screen_name = self.current_mode
        self.push_screen(TextScreen("keys", lambda _scene: list_all_keys(everywhere, screen_name)))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The command palette: every key's action, and the rank closest to its memory limit."""
        yield SystemCommand("Theme", "choose a theme", self.action_change_theme)
        for owner, prefix in ((self, "app"), (screen, "screen")):
            for binding in type(owner).BINDINGS:
                if isinstance(binding, Binding) and binding.description:
                    action = f"{prefix}.{binding.action}"
                    # A help text would take a second line of the list
                    title = f"{binding.description}  ({sign(binding.key)})"
                    yield SystemCommand(title, "", partial(self._run, action))
        nearest = nearest_oom(self.model.ranks) if self.model is not None else None
        if nearest is not None:
            open_it = partial(self.open_rank, nearest[0].rank)
            yield SystemCommand(f"Rank {nearest[0].rank}", "the closest to its limit", open_it)

    async def run_action(self, *action: Any, **namespaces: Any) -> bool:
        """Performs an action, unless the view is closing: keys typed after ``q`` are the shell's."""
        return self._exit or await super().run_action(*action, **namespaces)

    def _run(self, action: str) -> None:
        self.run_worker(self.run_action(action))


_PALETTE_KEY = (Binding("ctrl+p", "command_palette", "Every command, by name"),)


KEEP_TITLE = "\x1b[22;2t"
RESTORE_TITLE = "\x1b[23;2t"
"""xterm's stack of titles; terminals without one ignore both."""


def verdict_announcement(run: str, judged: Verdict, prior: Verdict | None) -> str:
    """The escape sequences for a verdict; "" for one whose health and severity are those of *prior*.

    The title (OSC 2, which tmux shows as that of the pane) has the health and the run. What has become
    critical while somebody watched rings the bell and makes a notification (OSC 9).
    """
    if prior is not None and (prior.health, prior.severity) == (judged.health, judged.severity):
        return ""
    sequence = f"\x1b]2;{clean(f'{judged.health} · {run} · zeromon')}\x07"
    if prior is not None and judged.severity is Severity.CRITICAL:
        sequence += f"\x07\x1b]9;{clean(f'{run} {judged.text}')}\x07"
    return sequence
