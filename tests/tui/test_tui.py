"""The terminal view: every key and action, what it looks like, and what does not break it."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import re
import resource
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from builders import changed, deepspeed_facts, rank, run
from textual.binding import Binding
from textual.pilot import Pilot
from textual.widgets import Input
from tui.snapshots import DATA_WAIT, FixedSource, FleetSource, fleet_picture, snapshot
from tui.test_lines import HOSTILE

from zeromon.base.errors import CaptureRefused, RunNotFound, SourceError
from zeromon.collector.http import start_http_server
from zeromon.readout.figures import MAPPED, STEP
from zeromon.readout.rank_map import map_ranks
from zeromon.readout.tables import RANK_COLUMNS, TRAFFIC_COLUMNS
from zeromon.snapshot import Finding, Hang, RunSnapshot
from zeromon.snapshot.communication import InFlight, MemberCall
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.step import Capture, CaptureState, TraceCheck
from zeromon.sources.base import Output, Source
from zeromon.sources.live import LiveSource
from zeromon.sources.replay import ReplaySource, StoreSource
from zeromon.storage.run_store import Store
from zeromon.storage.snapshot_log import Record
from zeromon.storage.step_history.rows import row_of
from zeromon.traces.analysis import RESULT_FILE, RankTrace, encode_analysis_result
from zeromon.tui.app import ZeromonApp
from zeromon.tui.columns import WHOLE_RUN, DisplayOptions, fit_columns
from zeromon.tui.drawing import HEAT_LEVELS
from zeromon.tui.event_log import Mark, Marks
from zeromon.tui.line import plain_text
from zeromon.tui.screens.collectives import Collectives, SpanLanes
from zeromon.tui.screens.ranks import HeatMap, Ranks
from zeromon.tui.screens.timeline import Lanes, Timeline
from zeromon.tui.screens.view import TABS, View
from zeromon.tui.status_text import figures_line
from zeromon.tui.widgets.panel import Page, TimeAxis
from zeromon.tui.widgets.table import Table

Make = Callable[..., ZeromonApp]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """An app on a source, with a store of its own and a clock that stands."""

    def app(source: Source | RunSnapshot, **facts: object) -> ZeromonApp:
        if isinstance(source, RunSnapshot):
            source = FixedSource(source)
        return ZeromonApp(
            source, store=Store(tmp_path / "store"), now=lambda: 1070.4, every_seconds=0.1,
            **facts,  # type: ignore[arg-type]
        )  # fmt: skip

    return app


@asynccontextmanager
async def running(app: ZeromonApp, width: int = 120, height: int = 40) -> AsyncIterator[Pilot[int]]:
    async with app.run_test(size=(width, height)) as pilot:
        await settled(pilot)
        yield pilot


async def settled(pilot: Pilot[int]) -> None:
    await until(pilot, lambda: pilot.app.model is not None)  # type: ignore[attr-defined]


async def until(pilot: Pilot[int], holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, screen_text(pilot.app)  # type: ignore[arg-type]
        await pilot.pause(0.01)
    await pilot.pause()


async def typed(pilot: Pilot[int], keys: str) -> None:
    """Types *keys*, each once the source was read anew and the screen stands still."""
    source: FixedSource = pilot.app.source  # type: ignore[attr-defined]
    for key in keys.split():
        await pilot.press(key)
        reads = source.reads
        await until(pilot, lambda reads=reads: source.reads > reads + 1)
        before = ""
        while before != (before := screen_text(pilot.app)):  # type: ignore[arg-type]
            await pilot.pause(0.1)
            await pilot.pause()


def screen_text(app: ZeromonApp) -> str:
    """What is on the screen, without colours."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(s.text for s in strip) for strip in lines)


async def says(pilot: Pilot[int], part: str) -> None:
    """A notification says so, soon."""
    await until(
        pilot, lambda: any(part in note.message for note in pilot.app._notifications)
    )  # fmt: skip


# ---- what it looks like --------------------------------------------------------------------------

SMALL, MIDDLE, LARGE = (80, 24), (120, 40), (200, 60)


@pytest.mark.parametrize(
    ("keys", "size", "ranks", "theme"),
    [
        ("1", SMALL, 8, ""), ("1", MIDDLE, 8, ""), ("1", LARGE, 64, ""),
        ("1", MIDDLE, 8, "zeromon-light"), ("1", MIDDLE, 8, "NO_COLOR"), ("1", SMALL, 8, "ansi-dark"),
        ("2", SMALL, 8, ""), ("2", MIDDLE, 8, ""), ("3", MIDDLE, 8, ""), ("4", MIDDLE, 8, ""),
        ("4", SMALL, 8, "NO_COLOR"), ("5", MIDDLE, 8, "zeromon-light"), ("5", LARGE, 1024, ""),
        ("5", SMALL, 1024, "NO_COLOR"), ("6", MIDDLE, 8, ""), ("7", MIDDLE, 8, ""),
        ("5 enter", MIDDLE, 8, ""), ("4 enter", SMALL, 8, ""), ("4 enter e plus", MIDDLE, 8, ""),
    ],
    ids=lambda v: f"{v[0]}x{v[1]}" if isinstance(v, tuple) else str(v).replace(" ", "-") or "dark",
)  # fmt: skip
def test_pictures(
    snap_compare: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    make: Make,
    keys: str,
    size: tuple[int, int],
    ranks: int,
    theme: str,
) -> None:
    """As SVG, kept beside this file."""
    if theme == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
        theme = ""

    async def before(pilot: Pilot[int]) -> None:
        await settled(pilot)
        await typed(pilot, keys)

    assert snap_compare(make(snapshot(ranks), theme=theme), terminal_size=size, run_before=before)


@pytest.mark.parametrize(
    ("keys", "size"), [("1", SMALL), ("1", MIDDLE), ("5", MIDDLE), ("5 n", LARGE)],
    ids=lambda v: f"{v[0]}x{v[1]}" if isinstance(v, tuple) else str(v).replace(" ", "-"),
)  # fmt: skip
def test_pictures_of_thousands_of_ranks(
    snap_compare: Callable[..., bool], make: Make, keys: str, size: tuple[int, int]
) -> None:
    """What a Prometheus tells of 2,048 nodes: how figures spread, a map of nodes, ranks that matter."""

    async def before(pilot: Pilot[int]) -> None:
        await settled(pilot)
        await until(pilot, lambda: bool(pilot.app._trends.whole))  # type: ignore[attr-defined]
        await typed(pilot, keys)

    made = make(FleetSource(fleet_picture()))
    assert snap_compare(made, terminal_size=size, run_before=before)


async def test_a_large_run_says_how_much_of_it_is_shown(make: Make) -> None:
    """And what is not seen; `n` shows nodes, Enter the ranks of one."""
    async with running(make(FleetSource(fleet_picture())), 120, 40) as pilot:
        text = screen_text(pilot.app)  # type: ignore[arg-type]
        for part in ("16,376 of 16,384 ranks", "2,048 nodes", "is 12.00 s ahead", "median", "failed"):
            assert part in text, (part, text)
        await pilot.press("5")
        await pilot.pause()
        assert "10 of 16,384 ranks, the most important" in screen_text(pilot.app)  # type: ignore[arg-type]
        await pilot.press("n")
        await pilot.pause()
        assert "2,048 nodes, the worst rank of each" in screen_text(pilot.app)  # type: ignore[arg-type]
        await pilot.press("g", "enter")
        await until(pilot, lambda: pilot.app.rank_filter.startswith("node"))  # type: ignore[attr-defined]
        assert "of 16,384 ranks" in screen_text(pilot.app)  # type: ignore[arg-type]


async def test_nodes_are_for_large_runs(make: Make) -> None:
    async with running(make(snapshot(8))) as pilot:
        await pilot.press("5", "n")
        await says(pilot, "all ranks are shown")


async def test_what_matters_fits_80x24(make: Make) -> None:
    """The danger, a step's parts, memory, exposed time, the gravest finding, the keys."""
    async with running(make(snapshot(2)), 80, 24) as pilot:
        text = screen_text(pilot.app)  # type: ignore[arg-type]
    for part in (
        "train_gpt-091500-abc", "live", "memory full at ~step 308", "22.0 %", "rank 0", "compute",
        "What does a step wait for?", "What do I change?", "Out of memory? yes", "ZM201",
        "Filter", "Help", "Pause",
    ):  # fmt: skip
        assert part in text, (part, text)


async def test_no_colour_means_none(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """Parts are letters; no cell has a colour."""
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(make(snapshot(8)), 100, 32) as pilot:
        assert "BBBB" in screen_text(pilot.app)  # type: ignore[arg-type]
        for strip in pilot.app.screen._compositor.render_strips():
            for segment in strip.apply_filter(
                pilot.app._filters[-1], pilot.app.screen.background_colors[0]
            ):
                assert (
                    segment.style is None
                    or segment.style.color is None
                    or segment.style.color.is_default
                )


# ---- screens -------------------------------------------------------------------------------------


async def test_number_keys_and_clicks_open_screens(make: Make) -> None:
    expected = {
        "memory": "by role", "communication": "in flight", "timeline": "shares, not times",
        "ranks": "micro-steps", "findings": "losses.append", "logs": "view opened: ranks",
        "overview": "step time",
    }  # fmt: skip
    app = make(snapshot(2))
    async with running(app) as pilot:
        for number in (2, 3, 4, 5, 6, 7, 1):
            await pilot.press(str(number))
            await pilot.pause()
            assert app.current_mode == TABS[number - 1]
            assert expected[TABS[number - 1]] in screen_text(app)
        await pilot.click("#tabs", offset=(16, 0))
        await pilot.pause()
        assert app.current_mode == "memory"


async def test_every_key_is_in_the_help_and_every_action_is_there(make: Make) -> None:
    app = make(snapshot(2))
    async with running(app, 120, 120) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        text = screen_text(app)
        for binding in app.BINDINGS:
            assert isinstance(binding, Binding)
            assert hasattr(app, f"action_{binding.action.partition('(')[0]}")
            assert binding.description in text
        for owner in (Table, TimeAxis, Timeline, SpanLanes, Collectives, Ranks):
            for binding in owner.BINDINGS:
                assert isinstance(binding, Binding)
                assert hasattr(owner, f"action_{binding.action.partition('(')[0]}")
                assert binding.description in text
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen.query("#bars")


async def test_the_help_begins_with_the_keys_of_the_screen_and_j_scrolls_it(make: Make) -> None:
    app = make(snapshot(2))
    async with running(app, 80, 24) as pilot:
        await pilot.press("5", "question_mark")
        await pilot.pause()
        assert screen_text(app).index("ranks") < screen_text(app).index("everywhere")
        assert "busbw" not in screen_text(app)
        before = screen_text(app)
        await pilot.press(*["j"] * 3)
        await pilot.pause()
        assert screen_text(app) != before
        await pilot.press("end")
        await pilot.pause()
        assert "busbw" in screen_text(app)


@pytest.mark.parametrize("width", range(60, 130))
def test_no_figure_is_cut_and_none_is_unknown(width: int) -> None:
    spans = figures_line(snapshot(2), DisplayOptions(), width)
    line = "".join(text for text, _ in spans)
    whole = "".join(text for text, _ in figures_line(snapshot(2), DisplayOptions(), 999))
    assert len(line) <= width
    assert all(
        f"{name}{value}" in whole for (name, _), (value, _) in zip(spans[::2], spans[1::2], strict=True)
    )
    assert whole.lstrip().startswith("step ") and "n/a" not in whole and "MFU" not in whole


def test_what_was_asked_for_comes_first_and_a_long_figure_hides_no_short_one() -> None:
    """``--tokens-per-step`` and ``--peak-flops`` at 70 columns."""
    look = DisplayOptions(tokens_per_step=2048, peak_flops=1e12)
    line = "".join(text for text, _ in figures_line(snapshot(2), look, 70))
    assert "tokens/s" in line and line.index("tokens/s") < line.index("exposed")
    wide = "".join(text for text, _ in figures_line(snapshot(2), look, 999))
    assert len(line) <= 70 < len(wide)


async def test_a_change_of_screen_leaves_nothing_over_it(make: Make) -> None:
    app = make(snapshot(2))
    async with running(app, 80, 24) as pilot:
        await pilot.press("7", "question_mark")
        await pilot.pause()
        assert "everywhere" in screen_text(app)
        await pilot.press("5")
        await pilot.pause()
        assert "everywhere" not in screen_text(app)
        await pilot.press("7")
        await pilot.pause()
        assert "everywhere" not in screen_text(app)


async def test_the_palette_knows_the_keys(make: Make) -> None:
    app = make(snapshot(2))
    async with running(app) as pilot:
        commands = list(app.get_system_commands(app.screen))
        assert all(not command.help for command in commands if "(" in command.title)  # one line each
        names = {command.title.partition("  (")[0] for command in commands}
        assert {
            "Pause",
            "Trace",
            "Report",
            "Timeline",
            "Save table as CSV",
            "Filter",
            "Theme",
            "Rank 1",
        } <= names
        next(c for c in commands if c.title == "Timeline  (4)").callback()
        await until(pilot, lambda: app.current_mode == "timeline")
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"configur", "enter")
        await until(pilot, lambda: "Memory of rank 0 by role" in screen_text(app))


async def test_the_keys_below_can_be_clicked(make: Make) -> None:
    app = make(snapshot(2))
    async with running(app) as pilot:
        line = screen_text(app).splitlines()[-1]
        await pilot.click("#keys", offset=(line.index("Help"), 0))
        await until(pilot, lambda: "everywhere" in screen_text(app))


async def test_configuration_report_and_themes(make: Make) -> None:
    app = make(run(rank(0, **deepspeed_facts()), run="zero"))
    async with running(app) as pilot:
        await pilot.press("c")
        await pilot.pause()
        for part in ("DeepSpeed engines", "deepspeed-zero3", "master param", "disk read"):
            assert part in screen_text(app), part
        await pilot.press("escape", "R")
        await pilot.pause()
        assert "run zero: running, step 20" in screen_text(app)
        await pilot.press("escape")
        first = app.theme
        await pilot.press("T")
        await pilot.pause()
        assert (first, app.theme) == ("zeromon-dark", "zeromon-light")
        await pilot.press("q")
    assert app.return_code == 0


# ---- when ----------------------------------------------------------------------------------------


def later(made: RunSnapshot, wall: float, name: str = "") -> RunSnapshot:
    return replace(made, taken_wall=wall, run=name or made.run)


async def test_space_holds_the_picture_and_lets_it_go_on(make: Make) -> None:
    source = FixedSource(snapshot(2), {1000.0: later(snapshot(2), 1000.0), 1070.0: snapshot(2)})
    app = make(source)
    async with running(app) as pilot:
        await pilot.press("space")
        source.answer = later(snapshot(2), 1090.0)
        await until(pilot, lambda: app.model.newest_wall == 1090.0)  # type: ignore[union-attr]
        assert app.model is not None
        assert app.model.run.taken_wall == 1070.0
        assert "paused 00:17:50, 20 s behind" in screen_text(app)
        assert "00:16:40" in screen_text(app)  # where what is kept begins
        await pilot.press("space")
        await until(pilot, lambda: app.model.run.taken_wall == 1090.0)  # type: ignore[union-attr]
        assert "paused" not in screen_text(app)


async def test_arrows_go_back_and_forth_in_what_is_kept(make: Make) -> None:
    """In steps of a sixtieth of it; beyond the end is now."""
    kept = {1000.0 + n: later(snapshot(2), 1000.0 + n, f"kept{n}") for n in range(0, 70, 2)}
    app = make(FixedSource(snapshot(2), kept))
    shown = lambda: app.model.run.run  # type: ignore[union-attr]  # noqa: E731
    async with running(app) as pilot:
        await until(pilot, lambda: app.model.span is not None)
        await pilot.press("left")
        await until(pilot, lambda: shown() == "kept68")
        await pilot.press("shift+left")
        await until(pilot, lambda: shown() == "kept48")
        await pilot.press("right")
        await until(pilot, lambda: shown() == "kept50")
        await pilot.press("shift+right")
        await until(pilot, lambda: shown() == "train_gpt-091500-abc")
        await pilot.press("shift+right", "right")
        await until(pilot, lambda: shown() == "train_gpt-091500-abc")
        await pilot.press("left")
        await until(pilot, lambda: shown() == "kept68")
        await pilot.press("l")
        await until(pilot, lambda: shown() == "train_gpt-091500-abc")


async def test_where_nothing_is_kept_it_says_so(make: Make) -> None:
    async with running(make(snapshot(2))) as pilot:
        await pilot.press("left")
        await says(pilot, "this run has no record to go back in")
        await pilot.press("greater_than_sign")
        await says(pilot, "only a replay has a speed")


async def test_a_replay_has_the_same_keys(make: Make, tmp_path: Path) -> None:
    """Pause, seek and speed; the clock of the replay is the test's."""
    store, now = Store(tmp_path / "store"), [0.0]
    record, last = Record(store.folder("old")), snapshot(2)
    for second in range(60):
        record.see(replace(last, run="old", taken_wall=2000.0 + second))
    record.keep(row_of(r.rank, step, 0) for r in last.ranks for step in r.steps.recent)
    store.save(replace(last, run="old", taken_wall=2059.0, ended=True))
    record.close()
    source = ReplaySource("old", store, clock=lambda: now[0])
    app = make(source)
    at = lambda: app.model.run.taken_wall  # type: ignore[union-attr]  # noqa: E731
    async with running(app) as pilot:
        assert at() == 2000.0
        assert "communication 21.9" in screen_text(app)  # of the phases, from the history
        assert "▶ replay 00:33:20 x1" in screen_text(app)
        now[0] = 5.0
        await until(pilot, lambda: at() == 2005.0)
        await pilot.press("greater_than_sign")
        await until(pilot, lambda: source.playback.speed == 2.0)
        now[0] = 10.0
        await until(pilot, lambda: at() == 2015.0)
        await pilot.press("space")
        await until(pilot, lambda: not source.playback.playing)
        assert "⏸ replay" in screen_text(app)
        await pilot.press("left")
        await until(pilot, lambda: at() == 2014.0)
        await pilot.press("less_than_sign", "space")
        await until(pilot, lambda: source.playback.playing and source.playback.speed == 1.0)
        await pilot.press("l")
        await until(pilot, lambda: at() == 2059.0)
        assert app.screen.query("#bars")  # the end of a replay opens no report


async def test_a_run_that_ends_shows_its_report(make: Make) -> None:
    source = FixedSource(snapshot(2))
    app = make(source)
    async with running(app) as pilot:
        ranks = tuple(changed(r, alive=False, ended="finished") for r in snapshot(2).ranks)
        source.answer = replace(snapshot(2), ended=True, ranks=ranks, taken_wall=1071.0)
        await until(pilot, lambda: "finished after 160 steps" in screen_text(app))
        assert "Steps (mean of the last 20 timed steps" in screen_text(app)
        await pilot.press("escape", "7")
        await pilot.pause()
        assert "the run has ended" in screen_text(app)


async def test_a_run_that_had_ended_before_shows_the_overview(make: Make) -> None:
    app = make(replace(snapshot(2), ended=True))
    async with running(app):
        assert app.screen.query("#bars")
        assert "ended 00:17:50" in screen_text(app)


# ---- a source that fails -------------------------------------------------------------------------


async def test_a_dead_source_is_said_and_the_picture_stays(make: Make) -> None:
    source = FixedSource(snapshot(2))
    app = make(source)
    async with running(app) as pilot:
        source.answer = SourceError("no collector answers at 127.0.0.1:1")
        await until(pilot, lambda: "no collector answers" in screen_text(app))
        assert "rank 0" in screen_text(app)
        assert "0 s old" in screen_text(app)
        source.answer = RunNotFound("gone")
        await until(pilot, lambda: "the run has ended: zeromon report" in screen_text(app))
        source.answer = snapshot(2)
        await until(pilot, lambda: "live" in screen_text(app))


async def test_a_source_that_breaks_is_asked_again_and_said(make: Make) -> None:
    """Also by an error that nobody foresaw."""
    source = FixedSource(snapshot(2))
    app = make(source)
    async with running(app) as pilot:
        source.answer = KeyError("oh")
        await until(pilot, lambda: "the terminal view failed: KeyError('oh')" in screen_text(app))
        source.answer = replace(snapshot(2), taken_wall=snapshot(2).taken_wall + 5)
        await until(pilot, lambda: not app.trouble)


async def test_before_the_first_picture_it_says_what_it_waits_for(make: Make) -> None:
    app = make(FixedSource(SourceError("no collector answers at x:1")))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "no collector answers at x:1" in screen_text(app))
        for key in (*"1234567", "space", "left", "t", "m", "x", "w", "a", "escape"):
            await pilot.press(key)  # nothing to act on, nothing breaks


async def test_a_slow_source_does_not_hold_up_the_keys(make: Make) -> None:
    class Slow(FixedSource):
        slow = False

        def latest(self) -> RunSnapshot:
            if self.slow:
                time.sleep(20)
            return super().latest()

    source = Slow(snapshot(2))
    app = make(source)
    async with running(app) as pilot:
        source.slow = True
        await pilot.pause(0.1)
        await pilot.press("5")
        await until(pilot, lambda: "micro-steps" in screen_text(app), 15)
        app.now = lambda: 1100.0
        app._show_snapshot_age()
        await pilot.pause()
        assert "30 s old" in screen_text(app)


async def test_it_finds_a_collector_that_comes_back_elsewhere(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    server = start_http_server(collector, "127.0.0.1", 0)  # type: ignore[arg-type]
    asked = []

    def again(name: str, gone: bool) -> Source:
        asked.append((name, gone))
        return LiveSource(f"127.0.0.1:{server.server_port}", name)

    app = make(LiveSource("127.0.0.1:1", "train-1"), reconnect=again)
    async with running(app):
        assert app.model is not None
        assert app.model.run.run == "train-1"
    server.shutdown()
    assert asked == [("train-1", False)]


# ---- which ranks ---------------------------------------------------------------------------------


async def test_a_filter_is_typed_shown_and_cleared(make: Make) -> None:
    app = make(snapshot(8))
    async with running(app) as pilot:
        await pilot.press("5", "slash", *"exposed>19", "enter")
        await pilot.pause()
        table = app.screen.query_one("#ranks", Table)
        assert [r.rank for r in table.rows] == [0, 1, 2]
        assert "ranks: exposed>19" in screen_text(app)
        assert table.has_focus
        await pilot.press("1")
        await pilot.pause()
        assert "rank 3 " not in screen_text(app).split("step time")[1]
        await pilot.press("escape")
        await until(pilot, lambda: app.rank_filter == "")
        await pilot.press("slash", "9", "9")
        await pilot.pause()
        await pilot.press("escape")
        await until(
            pilot, lambda: app.rank_filter == "" and not app.screen.query_one("#filter", Input).display
        )


async def test_the_cursor_the_order_and_the_header(make: Make) -> None:
    app = make(snapshot(64))
    async with running(app, 160, 30) as pilot:
        await pilot.press("5")
        await pilot.pause()
        table: Table[object] = app.screen.query_one("#ranks", Table)
        numbers = lambda: [r.rank for r in table.rows[:3]]  # type: ignore[attr-defined]  # noqa: E731
        for key, at in (
            ("down", 1),
            ("j", 2),
            ("up", 1),
            ("k", 0),
            ("end", 63),
            ("home", 0),
            ("G", 63),
            ("g", 0),
        ):
            await pilot.press(key)
            assert table.cursor == at, key
        await pilot.press("pagedown")
        assert table.cursor == table.size.height - 2
        await pilot.press("pageup")
        assert table.cursor == 0
        await pilot.press("end")
        await pilot.pause()
        assert "63 node07" in screen_text(app)
        await pilot.press("S")
        assert numbers() == [63, 62, 61]
        assert table.current.rank == 63  # type: ignore[union-attr]  # the cursor stays on its row
        await pilot.press("s")
        assert table.order == "node"
        table.sort("share")
        assert numbers() == [0, 16, 32]
        header = table.region.offset
        line = screen_text(app).splitlines()[header.y + 1]
        await pilot.click("#ranks", offset=(line.index("late") - header.x, 1))
        await pilot.pause()
        assert (table.order, numbers()[0]) == ("late", 1)


async def test_a_rank_is_opened_and_its_neighbours_too(make: Make) -> None:
    app = make(snapshot(8))
    async with running(app) as pilot:
        await pilot.press("5", "down", "down", "enter")
        await until(pilot, lambda: "NVIDIA H100" in screen_text(app))
        assert app.model is not None
        assert app.model.chosen == 2
        await pilot.press("right_square_bracket")
        await pilot.pause()
        assert "╭─ rank 3 ─" in screen_text(app)
        await pilot.press("left_square_bracket", "left_square_bracket", "left_square_bracket")
        await pilot.press("left_square_bracket")
        await pilot.pause()
        assert "╭─ rank 7 ─" in screen_text(app)
        await pilot.press("2")
        await pilot.pause()
        assert "rank 7 by role" in screen_text(app)
        await pilot.press("a")
        await pilot.pause()
        assert "rank 3 by role" in screen_text(app)  # the closest to its limit
        await pilot.press("5", "escape")
        await pilot.pause()
        assert app.screen.query("#heat")


async def test_the_heat_map_has_other_figures_and_takes_clicks(make: Make) -> None:
    app = make(snapshot(64))
    async with running(app, 160, 40) as pilot:
        await pilot.press("5")
        await pilot.pause()
        for figure in (*MAPPED[1:], MAPPED[0]):
            await pilot.press("h")
            await pilot.pause()
            assert f"─ {figure.label}" in screen_text(app), figure.name
        y, x = app.screen.query_one(HeatMap)._mesh.place(3)  # type: ignore[union-attr]
        await pilot.click("#heat", offset=(2 + x, 1 + y))
        await pilot.pause()
        assert app.screen.query_one("#ranks", Table).current.rank == 3  # type: ignore[union-attr]


# ---- communication, timeline, findings, logs -----------------------------------------------------


async def test_communication_is_added_up_and_filtered(make: Make) -> None:
    check = TraceCheck(
        steps=(3, 4), live_exposed_seconds=1.1, trace_exposed_seconds=1.0,
        live_communication_seconds=2.0, trace_communication_seconds=2.0,
    )  # fmt: skip
    shown = snapshot(8)
    app = make(replace(shown, ranks=(changed(shown.ranks[0], check=check), *shown.ranks[1:])))
    async with running(app, 160, 40) as pilot:
        assert "(a trace differs by 10 %)" in screen_text(app)
        await pilot.press("3")
        await pilot.pause()
        table: Table[object] = app.screen.query_one("#traffic", Table)
        assert (len(table.rows), table.rows[0].unit) == (18, "model.layers.2")  # type: ignore[attr-defined]
        assert "differs by +10.0 %" in screen_text(app)
        await pilot.press("slash", *"gather forward", "enter")
        await pilot.pause()
        assert len(table.rows) == 6
        for by, rows in (("op", 1), ("group", 1), ("dim", 1), ("phase", 1), ("unit", 6)):
            await pilot.press("b")
            await pilot.pause()
            assert (f"by {by}" in screen_text(app), len(table.rows)) == (True, rows)
        await pilot.press("escape")
        await pilot.pause()
        assert len(table.rows) == 18


@pytest.mark.parametrize(
    ("key", "part"), [("2", "GiB"), ("3", "layers."), ("4", "rank 0"), ("5 enter", "strategy")]
)
async def test_where_no_rank_is_let_through_none_is_shown(make: Make, key: str, part: str) -> None:
    """Not the one that was shown before."""
    app = make(snapshot(2))
    async with running(app, 140, 40) as pilot:
        await pilot.press(*key.split())
        await until(pilot, lambda: part in screen_text(app))
        app.filter_ranks("exposed>99")
        await pilot.pause()
        body = "\n".join(screen_text(app).splitlines()[3:])
        assert part not in body


async def test_what_is_in_flight_opens_its_rank_and_what_opens_nothing_does_not_say_so(
    make: Make,
) -> None:
    app = make(snapshot(8))
    async with running(app, 140, 40) as pilot:
        await pilot.press("3")
        await pilot.pause()
        assert "Open" not in screen_text(app)
        await pilot.press("tab")
        await pilot.pause()
        assert "Open" in screen_text(app)
        await pilot.press("down", "enter")
        await until(pilot, lambda: bool(app.screen.query("#rank-page")))
        assert "rank 1" in str(app.screen.query_one(Page).border_title)


async def test_a_key_is_seen_on_the_timeline_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New snapshots wait their turn there; what the user asked for does not."""
    monkeypatch.setattr("zeromon.tui.screens.timeline._MIN_PAUSE_SECONDS", 600.0)
    app = make(snapshot(8))
    async with running(app, 120, 40) as pilot:
        await pilot.press("4")
        await pilot.pause()
        lanes = app.screen.query_one(Lanes)
        lanes.set_timer = lambda *_: pytest.fail("a second clock")  # type: ignore[assignment, method-assign]
        await pilot.press("slash", *"2-3")
        await pilot.pause()
        assert "rank 5" not in screen_text(app)
        assert "rank 3" in screen_text(app)


async def test_lanes_zoom_and_pan(make: Make) -> None:
    app = make(snapshot(8))
    async with running(app) as pilot:
        await pilot.press("4")
        await pilot.pause()
        lanes = app.screen.query_one(Lanes)
        assert app.model is not None
        whole = lanes.shown_seconds()
        await pilot.press("plus")
        assert lanes.seconds == pytest.approx(whole / 2)
        await pilot.press("left")
        assert lanes.back == pytest.approx(whole / 8)
        await pilot.press("left", "right")
        assert lanes.back == pytest.approx(whole / 8)
        assert "before the newest" in str(lanes.border_title)
        await pilot.press("minus", "minus")
        assert lanes.seconds == pytest.approx(2 * whole)
        for _ in range(60):
            lanes.action_pan(1)
        known = app.model.ranks[7].steps.recent[-1].end_ns - 10**9
        assert lanes.back <= known / 1e9
        await pilot.press("home")
        assert (lanes.seconds, lanes.back) == (0.0, 0.0)
        await pilot.press("down", "down", "pagedown", "up")
        assert lanes.top == 6
        await pilot.pause()
        assert "rank 5" not in screen_text(app)
        await pilot.press("pageup")
        lanes.action_zoom(1e9)
        assert lanes.seconds == 36_000.0


async def test_the_diff_of_a_finding_is_copied_and_its_rule_explained(make: Make) -> None:
    app = make(snapshot(2))
    async with running(app) as pilot:
        await pilot.press("6")
        await pilot.pause()
        table: Table[object] = app.screen.query_one("#findings", Table)
        table.go((DATA_WAIT.rule, DATA_WAIT.rank))
        await pilot.pause()
        text = screen_text(app)
        for part in (
            "because no workers", "+ DataLoader(data, num_workers=4)", "a step 15.0 ms to 20.0 ms",
            "4 processes, and their batches",
        ):  # fmt: skip
            assert part in text, (part, text)
        await pilot.press("y")
        assert DATA_WAIT.remedy is not None
        assert app.clipboard == DATA_WAIT.remedy.diff
        await pilot.press("enter")
        await until(pilot, lambda: "ZM601 data_wait" in screen_text(app))
        await pilot.press("escape")
        table.go(("straggler", 1))
        await pilot.press("y")
        await says(pilot, "has no diff")


async def test_the_finding_of_the_verdict_is_on_top(make: Make) -> None:
    """Whatever the order of the codes."""
    late = Finding(
        rule="straggler", rank=1, code="ZM309", severity="warning", text="late by 20.0 ms per step",
        action="Look at train.py:9.", share=0.3,
    )  # fmt: skip
    ends = tuple(
        Finding(rule="rank_died", rank=n, code="ZM001", severity="warning", text="SIGTERM")
        for n in (0, 1)
    )
    ranks = tuple(changed(r, alive=False, ended="SIGTERM", risks=()) for r in snapshot(2).ranks)
    app = make(replace(snapshot(2), ranks=ranks, findings=(*ends, late), ended=True))
    async with running(app, 80, 24) as pilot:
        await pilot.press("6")
        await until(pilot, lambda: "Look at train.py:9." in screen_text(app))
        assert app.screen.query_one("#findings", Table).rows[0] == late


async def test_a_page_that_begins_to_scroll_cuts_no_word(make: Make) -> None:
    found = Finding(rule="own", rank=1, code="ZM609", severity="warning", text="short")
    source = FixedSource(replace(snapshot(2), findings=(found,)))
    app = make(source)
    async with running(app, 80, 24) as pilot:
        await pilot.press("6")
        await until(pilot, lambda: "short" in screen_text(app))
        words = " ".join(f"{'w' * 5}{n % 10}" for n in range(200))
        source.answer = replace(snapshot(2), findings=(replace(found, text=words),), taken_wall=1072.0)
        await until(pilot, lambda: "wwwww7" in screen_text(app))
        assert app.screen.query_one("#finding", Page).show_vertical_scrollbar
        rows = screen_text(app).splitlines()
        page = rows[next(n for n, row in enumerate(rows) if "the finding" in row) :]
        assert not any("…" in row for row in page)


async def test_the_list_of_runs_says_how_each_ended(make: Make, tmp_path: Path) -> None:
    """Where there is no room for both, the verdict stands instead of the command."""
    ended = replace(snapshot(1), run="recorded", ended=True, command=("python", "train.py") * 9)
    Store(tmp_path / "store").save(ended)
    app = make(snapshot(2))
    async with running(app, 80, 24) as pilot:
        await pilot.press("r")
        await until(pilot, lambda: "recorded" in screen_text(app))
        row = next(row for row in screen_text(app).splitlines() if "recorded" in row)
        verdict = row.partition("recorded")[2].strip(" │")
        assert len(verdict) > 22 and "python" not in verdict


async def test_logs_tell_what_happened(make: Make) -> None:
    source = FixedSource(snapshot(2))
    source.known = [
        Finding(rule="old", rank=-1, code="ZM999", severity="warning", text="it was so",
                     came=1010.0, gone=1020.0),
    ]  # fmt: skip
    app = make(source)
    async with running(app, 140, 40) as pilot:
        await pilot.press("7")
        await until(pilot, lambda: "00:16:50  ZM999 it was so" in screen_text(app))
        assert "00:17:00  ZM999 no longer: old" in screen_text(app)
        ranks = list(snapshot(2).ranks)
        ranks[1] = changed(ranks[1], alive=False, failed=True, ended="SIGKILL", errors=3, dropped=7,
                           unseen=("torch.x",))  # fmt: skip
        source.answer = replace(
            snapshot(2), ranks=tuple(ranks), findings=(), taken_wall=1072.0, history_note="disk full"
        )
        await until(pilot, lambda: "rank 1 ended: SIGKILL" in screen_text(app))
        text = screen_text(app)
        for part in ("3 errors in hooks", "7 records were overwritten", "torch.x", "disk full",
                     "ZM601 no longer: data wait"):  # fmt: skip
            assert part in text, (part, text)
        await pilot.press("slash", *"sigkill", "enter")
        await pilot.pause()
        assert "disk full" not in screen_text(app)


async def test_the_newest_note_stays_in_sight(make: Make) -> None:
    """However the room changes; and a note that the user went back to stays, too."""
    notes = tuple(
        Finding(rule=f"r{n}", code="ZM999", severity="info", rank=0, text=f"it is so {n} " * 9)
        for n in range(60)
    )
    source = FixedSource(replace(snapshot(2), findings=notes[:30]))
    app = make(source)
    async with running(app, 100, 30) as pilot:
        await pilot.press("7")
        page = app.screen.query_one(Page)
        await until(pilot, lambda: page.scroll_offset.y == page.max_scroll_y > 0)
        for size in ((100, 18), (60, 18), (100, 50), (100, 18)):
            await pilot.resize_terminal(*size)
            await until(pilot, lambda: page.scroll_offset.y == page.max_scroll_y > 0)
        before = page.max_scroll_y
        source.answer = replace(source.answer, findings=notes, taken_wall=1071.0)
        await until(pilot, lambda: page.scroll_offset.y == page.max_scroll_y > before)
        await pilot.press("up")
        await until(pilot, lambda: page.scroll_offset.y == page.max_scroll_y - 1)
        at = page.scroll_offset.y
        source.answer = replace(source.answer, findings=(), taken_wall=1072.0)
        await until(pilot, lambda: page.max_scroll_y > at + 1)
        assert page.scroll_offset.y == at


# ---- actions -------------------------------------------------------------------------------------


async def test_shares_and_windows(make: Make) -> None:
    source = FixedSource(snapshot(8))
    app = make(source)
    async with running(app) as pilot:
        assert "for? mean of the last 20 steps" in screen_text(app)
        await pilot.press("percent_sign")
        await pilot.pause()
        assert "shares of a step, mean of the last 20 steps" in screen_text(app)
        await pilot.press("w")
        await says(pilot, "60 steps")
        await until(pilot, lambda: "step 101" in screen_text(app))
        while app.look.window != WHOLE_RUN:
            await pilot.press("w")
        await until(pilot, lambda: bool(source.asked) and "━ rank 3" in screen_text(app))
        assert source.asked[-1] == (0, 3, 7)  # the most exposed, the fullest, the slowest
        assert "step 1 " in screen_text(app)
        await pilot.press("w")
        await until(pilot, lambda: "median" in screen_text(app))


def marked(app: ZeromonApp) -> bool:
    """Whether a chart shows a mark."""
    return "▲" in screen_text(app).split("step time")[1]


async def test_a_mark_is_kept_beside_the_run(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "store" / "runs" / snapshot(2).run
    folder.mkdir(parents=True)
    for _ in range(2):  # the second view finds the mark of the first
        app = make(snapshot(2))
        async with running(app) as pilot:
            await pilot.press("m", *"new data", "enter")
            await says(pilot, "step 160 is marked, in ")
            await until(pilot, partial(marked, app))
            await pilot.press("m", "x", "escape")  # left: no mark
    path = folder / "marks.jsonl"
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["new data"] * 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("broken\n" + path.read_text() + '{"wall": "no"}\n')
    app = make(snapshot(2))
    async with running(app) as pilot:
        await pilot.press("7")
        await until(pilot, lambda: screen_text(app).count("mark at step 160: new data") == 2)


async def test_a_mark_of_a_run_elsewhere_is_kept_in_memory(make: Make, tmp_path: Path) -> None:
    app = make(snapshot(2))
    async with running(app) as pilot:
        await pilot.press("m", "enter")
        await says(pilot, "only until this view is closed")
        assert [(mark.wall, mark.step) for mark in app._marks.all] == [(1070.0, 160)]
    assert not list(tmp_path.rglob("marks.jsonl"))


def test_a_mark_that_the_disk_refuses_is_kept_in_memory(tmp_path: Path) -> None:
    marks, limits = Marks(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert not marks.add(Mark(1070.0, 160, "new data"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [mark.text for mark in marks.all] == ["new data"]


def test_a_pipe_in_place_of_the_marks_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "marks.jsonl")
    marks = Marks(tmp_path)
    assert not marks.all and not marks.add(Mark(1070.0, 160, ""))


async def test_a_tick_before_the_screen_is_laid_out_is_nothing(make: Make) -> None:
    app = make(snapshot(2))
    async with running(app):
        view = app._view()
        assert view is not None
        await view.query("#head").remove()
        view.show_snapshot_age()
        view.show()


async def test_tables_and_the_screen_are_written(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = make(snapshot(2))
    async with running(app) as pilot:
        for key in "1234567":
            await pilot.press(key, "x")
            await pilot.pause()
        await pilot.press("5", "enter")
        await until(pilot, lambda: bool(app.screen.query("#rank-page")))
        await pilot.press("x", "p")
        await says(pilot, ".svg")
        await pilot.press("question_mark", "x")
        await says(pilot, "no table")
        await pilot.press("p")
        await until(pilot, lambda: len(list(tmp_path.glob("*.svg"))) == 2)
    assert not any("written" in path.read_text() for path in tmp_path.glob("*.svg"))
    found = (re.sub(r"-\d{6}(-\d)?.csv", "", path.name) for path in tmp_path.glob("*.csv"))
    names = sorted(name.removeprefix("zeromon-train_gpt-091500-abc-") for name in found)
    assert names == [
        "communication-rank0", "findings", "memory-rank1", "notes", "rank0", "ranks", "ranks", "steps",
    ]  # fmt: skip
    rows = list(csv.DictReader(next(tmp_path.glob("*steps*.csv")).open()))
    assert len(rows) == 2 * 160
    step = snapshot(2).ranks[0].steps.recent[0]
    assert float(rows[0]["duration_seconds"]) == pytest.approx(step.seconds)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.glob("zeromon-*"))
    assert "@font-face" not in next(tmp_path.glob("*.svg")).read_text()


class Collector:
    """Takes a request for a trace, and goes on with it snapshot by snapshot."""

    def __init__(self) -> None:
        self.view = (run(rank(0)),)
        self.refuses = ""

    def was_read(self) -> None:
        pass

    def past(self, name: str) -> StoreSource:
        raise SourceError(f"nothing is kept of {name}")

    def trace(self, name: str, steps: int, ranks: list[int]) -> Capture:
        if self.refuses:
            raise CaptureRefused(self.refuses)
        made = Capture(number=1, state="waiting", first=30, steps=steps, ranks=(0,), folder="/f")
        self.step(capture=made)
        return made

    def step(self, **facts: object) -> None:
        now = replace(self.view[0], **facts)  # type: ignore[arg-type]
        self.view = (replace(now, taken_wall=now.taken_wall + 1),)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Collector]:
    """A collector of this user, which `node_runs` finds."""
    made = Collector()
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("ZEROMON_TOKEN", "secret")
    (tmp_path / "rings").mkdir(mode=0o700)
    server = start_http_server(made, "127.0.0.1", 0, "secret")  # type: ignore[arg-type]
    facts = {"host": "127.0.0.1", "port": server.server_port}
    (tmp_path / "rings" / "collector.json").write_text(json.dumps(facts))
    made.address = f"127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    yield made
    server.shutdown()


async def test_t_asks_for_a_trace_and_tells_how_far_it_is(make: Make, collector: Collector) -> None:
    app = make(LiveSource(collector.address, "train-1"))  # type: ignore[attr-defined]
    async with running(app) as pilot:
        await pilot.press("t")
        said = "trace 1: begins with step 30, step 20 has ended"
        await until(pilot, lambda: said in screen_text(app).splitlines()[0])
        assert not app._notifications  # the first line is enough
        made = collector.view[0].capture
        assert made is not None
        assert made.steps == 2
        collector.step(capture=replace(made, state="done", files=("/f/rank0.json",)))
        await says(pilot, "trace 1: 1 files in /f")
        collector.refuses = "trace 1 of this run is still recording"
        await pilot.press("t")
        await says(pilot, "still recording")


async def test_without_a_live_run_t_says_why_not(make: Make) -> None:
    async with running(make(snapshot(2))) as pilot:
        await pilot.press("t")
        await says(pilot, "needs a live run")


async def test_r_turns_to_another_run(make: Make, collector: Collector, tmp_path: Path) -> None:
    """Live ones and recorded ones; nothing of the first is left."""
    Store(tmp_path / "store").save(replace(snapshot(1), run="recorded", ended=True))
    app = make(snapshot(8))
    async with running(app) as pilot:
        app.filter_ranks("3")
        await pilot.press("r")
        await until(pilot, lambda: bool(app.screen.query("#runs")))
        table: Table[object] = app.screen.query_one("#runs", Table)
        assert [r.run for r in table.rows] == ["train-1", "recorded"]  # type: ignore[attr-defined]
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.model is not None and app.model.run.run == "recorded")
        await pilot.press("r")
        await until(pilot, lambda: bool(app.screen.query("#runs")))
        await pilot.press("enter")
        await until(pilot, lambda: app.model is not None and app.model.run.run == "train-1")
        await pilot.press("r")
        await until(pilot, lambda: bool(app.screen.query("#runs")))
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, View))


# ---- what must not break it ----------------------------------------------------------------------


def hostile(text: str) -> RunSnapshot:
    """*text* wherever a run can put a name."""
    shown = snapshot(2)
    flying = InFlight(op=text, group=text, sequence=1, unit=text, phase=text, nbytes=1, issued_ns=0)
    ranks = tuple(
        changed(
            one, node=text, device=text, strategy=text, unit=text, exception=text, in_flight=(flying,),
            unseen=(text,), phase=text,
            units=tuple(replace(unit, fqn=text) for unit in one.communication.units),
            traffic=tuple(
                replace(row, unit=text, group=text, op=text) for row in one.communication.traffic
            ),
        )
        for one in shown.ranks
    )  # fmt: skip
    remedy = Remedy(cause=text, dialect=text, diff=f"- {text}\n+ {text}", effect=text, price=text)
    finding = Finding(rule=text, severity="critical", text=text, code=text, remedy=remedy)
    hang = Hang(
        kind=text, op=text, group=text, group_id=text, sequence=1, nbytes=1, seconds=3.0, waiting=(0,),
        missing=(1,), dead=(), elsewhere=(),
        calls=(MemberCall(rank=0, sequence=1, op=text, unit=text, phase=text),),
    )  # fmt: skip
    return replace(
        shown, run=text, command=(text,), node=text, ranks=ranks, findings=(finding,), note=text,
        hangs=(hang,), history_note=text,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text", ["".join(HOSTILE[:4]) + HOSTILE[4], HOSTILE[1], HOSTILE[5] + HOSTILE[6]],
    ids=["all", "wide", "long"],
)  # fmt: skip
async def test_hostile_names_do_not_break_a_screen(make: Make, text: str) -> None:
    """Every line is as wide as the terminal, and nothing that a terminal would obey gets out."""
    app = make(hostile(text))
    async with running(app, 100, 30) as pilot:
        for keys in ("1", "2", "3", "4", "5", "5 enter", "6", "7", "c", "escape", "R"):
            await pilot.press(*keys.split())
            await pilot.pause()
            strips = app.screen._compositor.render_strips()
            shown = ["".join(segment.text for segment in strip) for strip in strips]
            assert {strip.cell_length for strip in strips} == {100}, keys
            assert not any(sign < " " or sign in "\x7f\x9b‮⁦​" for line in shown for sign in line)


async def test_a_run_without_ranks_and_one_without_steps(make: Make) -> None:
    bare = tuple(changed(one, recent=()) for one in snapshot(2).ranks)
    for made in (run(), replace(snapshot(2), ranks=bare)):
        app = make(made)
        async with running(app, 80, 24) as pilot:
            for key in "1234567":
                await pilot.press(key, "right_square_bracket", "enter")
                await pilot.pause()
            assert app.model is not None


@pytest.mark.parametrize("size", [(20, 5), (40, 12), (300, 90)], ids=str)
async def test_any_size_is_drawn(make: Make, size: tuple[int, int]) -> None:
    app = make(snapshot(40))
    async with running(app, *size) as pilot:
        for key in "1234567":
            await pilot.press(key)
            await pilot.pause()
        await pilot.resize_terminal(size[1] * 2, size[0])
        await pilot.pause()
        assert {strip.cell_length for strip in app.screen._compositor.render_strips()} == {size[1] * 2}


async def test_only_what_is_on_the_screen_is_drawn(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of a thousand ranks formats as many rows as it shows."""
    from zeromon.tui.widgets import table as module

    formatted = 0
    original = module.row_spans

    def counted(*arguments: object) -> object:
        nonlocal formatted
        formatted += 1
        return original(*arguments)  # type: ignore[arg-type]

    app = make(snapshot(1024))
    async with running(app, 120, 40) as pilot:
        await pilot.press("5")
        await pilot.pause()
        monkeypatch.setattr(module, "row_spans", counted)
        await pilot.press("down")
        await pilot.pause()
    assert 0 < formatted <= 2 * 40


async def test_nothing_runs_on_after_it_is_closed(make: Make) -> None:
    source = FixedSource(snapshot(2))
    app = make(source)
    async with running(app):
        pass
    asked = source.reads
    await asyncio.sleep(0.15)
    assert source.reads == asked


# ---- columns, traces, what is missing ------------------------------------------------------------


async def test_columns_are_chosen_and_one_always_stays(make: Make) -> None:
    app = make(snapshot(8))
    async with running(app, 160, 40) as pilot:
        await pilot.press("5")
        await pilot.pause()
        table = app.screen.query_one("#ranks", Table)
        await pilot.press("C", "down", "space", "down", "enter")
        await pilot.pause()
        assert table.hidden == {"node", "state"}
        await pilot.press("home", *["space", "down"] * len(table.columns))
        assert len(table.hidden) < len(table.columns)
        await pilot.press("escape")
        await pilot.pause()
        assert "columns" not in screen_text(app)
        shown = [column.name for column, _ in table._columns_on_screen()]
        assert shown and not set(shown) & table.hidden


async def test_the_analysis_of_the_last_trace_is_a_screen(make: Make, tmp_path: Path) -> None:
    one = RankTrace(
        rank=0, file="rank0.json", span_seconds=1.0, compute_seconds=0.5, exposed_seconds=0.25,
        communication_seconds=0.5, overlap_ratio=0.5, exposed_copy_seconds=0.0, idle_seconds=0.25,
        events=9, ops=(), units=(), kernels=(),
    )  # fmt: skip
    (tmp_path / RESULT_FILE).write_bytes(encode_analysis_result([one]))
    made = Capture(
        number=3,
        state=CaptureState.DONE,
        first=7,
        steps=2,
        folder=str(tmp_path),
        ranks=(0,),
        files=("rank0.json.gz",),
    )
    app = make(replace(snapshot(2), capture=made))
    async with running(app) as pilot:
        await pilot.press("A")
        await pilot.pause()
        text = screen_text(app)
        assert "Trace 3: steps 7 to 8 of 1 ranks" in text
        assert "Where the time of the device went" in text and "25.0 %" in text
    app = make(replace(snapshot(2), capture=None))
    async with running(app) as pilot:
        await pilot.press("A")
        await pilot.pause()
        assert "no trace was taken of this run" in screen_text(app)


async def test_a_run_without_ranks_blames_no_filter(make: Make) -> None:
    app = make(replace(snapshot(2), ranks=()))
    async with running(app) as pilot:
        for key in "1234567":
            await pilot.press(key)
            await pilot.pause()
            assert "filter" not in screen_text(app).replace("/ Filter", ""), key
        await pilot.press("5", "slash", *"99", "enter")
        await pilot.pause()
        assert "no rank matches the filter" in screen_text(app)


async def test_a_call_stack_is_on_the_page_of_its_rank(make: Make) -> None:
    base = snapshot(2)
    stuck = changed(base.ranks[0], stack=("train.py:10 main", "train.py:99 save"))
    app = make(replace(base, ranks=(stuck, base.ranks[1])))
    async with running(app, 120, 60) as pilot:
        await pilot.press("5", "enter")
        await until(pilot, lambda: bool(app.screen.query("#rank-page")))
        assert "call stack" in screen_text(app) and "train.py:99 save" in screen_text(app)


def test_on_a_wide_terminal_figures_stay_near_the_name() -> None:
    widths = {column.name: size for column, size in fit_columns(TRAFFIC_COLUMNS, 240)}
    assert widths["unit"] <= 18 + 48
    (last,) = (size for column, size in fit_columns(RANK_COLUMNS, 240) if column.name == "unit")
    assert sum(size for _, size in fit_columns(RANK_COLUMNS, 240)) == 240 and last > 18


async def test_the_trainings_output_is_on_the_logs_and_can_be_filtered(make: Make) -> None:
    app = make(snapshot(2))
    async with running(app) as pilot:
        await pilot.press("7", "o")
        await until(pilot, lambda: "step 2 loss 2.4" in screen_text(app))
        assert "/logs/train.log" in screen_text(app)
        await pilot.press("slash", *"step 2", "enter")
        await until(pilot, lambda: "step 1 loss" not in screen_text(app))
        assert "step 2 loss 2.4" in screen_text(app)
        await pilot.press("escape", "o")
        await until(pilot, lambda: "step 2 loss 2.4" not in screen_text(app))


async def test_without_an_output_the_logs_say_why(make: Make) -> None:
    class Piped(FixedSource):
        def output(self, pid: int) -> Output:
            raise SourceError("the output goes to a pipe, which keeps nothing", "Use a file.")

    app = make(Piped(snapshot(2)))
    async with running(app) as pilot:
        await pilot.press("7", "o")
        await until(pilot, lambda: "which keeps nothing. Use a file." in screen_text(app))


async def test_few_ranks_have_the_facts_of_one_below_their_table_and_no_heat_map(make: Make) -> None:
    """At 80x24 no line of them is cut; the cursor chooses the rank."""
    app = make(snapshot(2))
    async with running(app, 80, 24) as pilot:
        await pilot.press("5")
        await until(pilot, lambda: "micro-steps" in screen_text(app))
        assert not app.screen.query_one(HeatMap).display
        page = app.screen.query_one(Page)
        assert page.border_title == "rank 0"
        rows = [plain_text(row).rstrip() for row in page.text]
        end = rows.index("")  # the bars of the step follow
        assert all(len(row) <= page.scrollable_content_region.width for row in rows[:end]), rows[:end]
        await pilot.press("j")
        await until(pilot, lambda: page.border_title == "rank 1")
        await pilot.press("h")
        await says(pilot, "the heat map is for 5 ranks")


async def test_steps_that_take_as_long_have_the_same_shade(make: Make) -> None:
    """546.2 and 546.1 ms are no dark and no bright cell: the scale is at least a tenth of them."""
    seconds = (0.5462, 0.5461, 0.5463, 0.5462, 0.1)
    shown = run(*(rank(n, mean_seconds=mean) for n, mean in enumerate(seconds)))
    drawn_map = map_ranks(shown, STEP, shown.ranks)
    assert [drawn_map.shade(value, HEAT_LEVELS) for value in seconds] == [3, 3, 3, 3, 0]
    almost_equal = map_ranks(shown, STEP, shown.ranks[:4])
    assert {almost_equal.shade(value, HEAT_LEVELS) for value in seconds[:4]} == {3}
    async with running(make(shown)) as pilot:
        await pilot.press("5", *"h" * MAPPED.index(STEP))
        await pilot.pause()
        lines = screen_text(pilot.app).splitlines()  # type: ignore[arg-type]
    at = next(n for n, line in enumerate(lines) if "step time, mean of the last 20 steps, ms" in line)
    assert lines[at + 1].split()[1:] == ["0", "▸", "546", "546", "546", "546", "100", "│"]


def hung_on_two_nodes() -> RunSnapshot:
    """Sixteen ranks on nodes whose names and numbers have another order; rank 9 is awaited."""
    ranks = [
        rank(n, node="b" if n < 8 else "a", late_seconds=0.021 if n == 3 else 0.001 * (n % 3))
        for n in range(16)
    ]
    stuck = Hang(
        kind="a member has not come", op="all_reduce", group="dp", group_id="0", sequence=7, nbytes=4,
        seconds=40.0, waiting=(0,), missing=(9,),
    )  # fmt: skip
    return replace(run(*ranks), hangs=(stuck,))


async def test_the_map_is_by_node_and_marks_the_rank_that_a_hang_waits_for(make: Make) -> None:
    app = make(hung_on_two_nodes())
    async with running(app, 80, 24) as pilot:
        await pilot.press("5")
        await pilot.pause()
        lines = screen_text(app).splitlines()
        at = next(n for n, line in enumerate(lines) if "16 ranks, ✖ rank 9 awaited in a hang" in line)
        assert lines[at + 1].split()[1:5] == ["b", "0", "▸", "0.0"]
        assert lines[at + 2].split()[1:5] == ["a", "8", "2.0✖", "0.0"]
        assert "min 0 us" in lines[at + 3]
        assert "max 21.0 ms" in lines[at + 3]
        y, x = app.screen.query_one(HeatMap)._mesh.place(9)
        await pilot.click("#heat", offset=(2 + x, 1 + y))
        await pilot.pause()
        assert app.screen.query_one("#ranks", Table).current.rank == 9  # type: ignore[union-attr]
