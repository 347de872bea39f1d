"""What a terminal shows, of which only what changed was drawn, is what drawing all of it would show."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from builders import changed
from rich.cells import cell_len
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Input
from tui.snapshots import DATA_WAIT, FixedSource, snapshot
from tui.test_tui import until

from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import Store
from zeromon.tui import app as app_module
from zeromon.tui.app import ZeromonApp
from zeromon.tui.screens.timeline import Lanes
from zeromon.tui.screens.view import View
from zeromon.tui.widgets.panel import Panel

_KEYS = (
    *"1234567", *"1234567", *"[]abhsSuw%/?cRTTm", "left", "right", "up", "down", "home", "end",
    "enter", "escape", "escape", "space", "plus", "minus", "tab", "pagedown", "ctrl+p", *"TTT",
)  # fmt: skip
_SIZES = ((80, 24), (120, 40), (97, 31), (200, 60), (40, 12))
_SEQUENCE = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|([^\x1b\n]+)")


class Watched(ZeromonApp):
    """With a terminal that keeps what it is told to show: of every cell, the sign and its style."""

    CSS_PATH = Path(app_module.__file__).with_name("zeromon.tcss")

    def __init__(self, source: FixedSource, folder: Path, theme: str) -> None:
        super().__init__(
            source, store=Store(folder), now=lambda: 1070.4, every_seconds=0.02, theme=theme
        )
        self.shown: dict[tuple[int, int], tuple[str, str]] = {}

    def _display(self, screen: Screen[object], renderable: object) -> None:
        if renderable is not None and not self._batch_count and screen is self.screen:
            self._obey(renderable.render_segments(self.console))  # type: ignore[attr-defined]
        super()._display(screen, renderable)  # type: ignore[arg-type]

    def _obey(self, written: str) -> None:
        x = y = 0
        style = ""
        for sequence in _SEQUENCE.finditer(written):
            numbers, order, text = sequence.groups()
            if order == "H":
                y, x = (int(number) - 1 for number in numbers.split(";"))
            elif order == "m":
                style = "" if numbers in ("", "0") else numbers
            for sign in text or "":
                size = cell_len(sign)
                for cell in range(size):
                    self.shown[x + cell, y] = ("", "") if cell else (sign, style)
                x += size

    def rows(self) -> list[list[tuple[str, str]]]:
        """What can be seen of it."""
        width, height = self.size
        return [[self.shown.get((x, y), ("", "")) for x in range(width)] for y in range(height)]


def snapshots() -> list[RunSnapshot]:
    """Of one run, with more and fewer ranks, steps, findings and words of them."""
    made = []
    for number, (ranks, steps) in enumerate(((2, 40), (8, 160), (3, 7), (1, 0), (40, 161))):
        base = snapshot(ranks, max(1, steps))
        said = replace(DATA_WAIT, text=f"{number} 等待\u0301 " * (1 + 9 * (number % 2)))
        if not steps:
            base = replace(base, ranks=tuple(changed(r, recent=()) for r in base.ranks))
        made.append(
            replace(
                base,
                findings=(base.findings, (), (said,) * 9)[number % 3],
                note="the clock is ahead" if number == 1 else "",
                taken_wall=1060.0 + number,
            )
        )
    return made


async def settled(pilot: Pilot[int], app: Watched) -> None:
    """Nothing is left to draw, and nothing comes."""
    for _ in range(3):
        await pilot.pause()
    app.clear_notifications()
    for asked in app.screen.query(Input):
        asked.cursor_blink = False
    view = app.screen
    if isinstance(view, View) and view.query(Lanes):
        lanes = view.query_one(Lanes)
        if lanes._soon is not None:
            lanes._soon.stop()
            lanes._draw_waiting_model()
    for _ in range(3):
        await pilot.pause()


async def drawn_anew(pilot: Pilot[int], app: Watched) -> None:
    """All of it, as if nothing had been drawn before."""
    app.shown.clear()
    for widget in app.screen.walk_children(with_self=True):
        widget._styles_cache.clear()
        widget.clear_cached_dimensions()
        if isinstance(widget, Panel):
            widget._made = widget._ink = None
        widget.refresh()
    if isinstance(app.screen, View):
        app.screen.show()
    app.screen.refresh(layout=True)
    await settled(pilot, app)


@pytest.mark.parametrize(
    ("theme", "seed", "rounds"),
    [
        ("zeromon-dark", 1, 5), ("NO_COLOR", 6, 5),
        *(
            pytest.param(theme, seed, 40, marks=pytest.mark.long)
            for seed, theme in enumerate(("zeromon-dark", "zeromon-light", "ansi-dark", "NO_COLOR"))
        ),
    ],
)  # fmt: skip
async def test_the_terminal_shows_what_drawing_all_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theme: str, seed: int, rounds: int
) -> None:
    """After any keys, snapshots and sizes, on whatever screen."""
    if theme == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
        theme = ""
    monkeypatch.chdir(tmp_path)
    chance = random.Random(seed)
    known = snapshots()
    source = FixedSource(known[0], {one.taken_wall: one for one in known})
    app = Watched(source, tmp_path / "store", theme)
    done: list[str] = []
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.model is not None)
        for number in range(rounds):
            for _ in range(chance.randint(1, 4)):
                what = chance.random()
                if what < 0.15:
                    size = chance.choice(_SIZES)
                    done.append(str(size))
                    await pilot.resize_terminal(*size)
                elif what < 0.4:
                    source.answer = replace(chance.choice(known), taken_ns=number)
                    done.append(f"snapshot of {len(source.answer.ranks)}")
                    await pilot.pause(0.05)
                else:
                    done.append(chance.choice(_KEYS))
                    await pilot.press(done[-1])
            await settled(pilot, app)
            if isinstance(app.screen, CommandPalette):
                continue
            before = app.rows()
            await drawn_anew(pilot, app)
            assert before == app.rows(), (done[-12:], different(before, app.rows()))


def different(before: list[list[tuple[str, str]]], after: list[list[tuple[str, str]]]) -> list[str]:
    """The lines that are not the same, as they are and as they should be."""
    made = []
    for y, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            at = next(x for x, cells in enumerate(zip(old, new, strict=True)) if len(set(cells)) > 1)
            made += [f"{y}:{at} {old[at]} {''.join(c for c, _ in old)}",
                     f"{y}:{at} {new[at]} {''.join(c for c, _ in new)}"]  # fmt: skip
    return made
