"""Keys that are typed together with ``q``: the view closes, and nothing else happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events
from textual.binding import Binding
from textual.pilot import Pilot
from tui.snapshots import FixedSource, snapshot

from zeromon.storage.run_store import Store
from zeromon.tui.app import ZeromonApp
from zeromon.tui.screens.collectives import Collectives, SpanLanes
from zeromon.tui.screens.ranks import Ranks
from zeromon.tui.screens.timeline import Timeline
from zeromon.tui.screens.view import View
from zeromon.tui.widgets.panel import TimeAxis
from zeromon.tui.widgets.table import Table

_OWNERS = (ZeromonApp, View, Table, TimeAxis, Timeline, SpanLanes, Collectives, Ranks)
KEYS = sorted(
    {
        key
        for owner in _OWNERS
        for binding in owner.BINDINGS
        if isinstance(binding, Binding)
        for key in binding.key.split(",")
    }
    | {"enter", "tab", "z"}
)


def typed(pilot: Pilot[int], *keys: str) -> None:
    """Types faster than the application handles: no pause between the keys."""
    for key in keys:
        pilot.app.post_message(events.Key(key, key if len(key) == 1 else None))


async def screens_after(
    tmp_path: Path, screen: str, *keys: str, size: tuple[int, int] = (80, 24)
) -> list[str]:
    """Names of the screens that *keys* opened in a terminal of *size*."""
    opened: list[str] = []
    app = ZeromonApp(FixedSource(snapshot(2)), store=Store(tmp_path), now=lambda: 1070.4)
    async with app.run_test(size=size) as pilot:
        while app.model is None:
            await pilot.pause(0.01)
        await pilot.press(screen)
        await pilot.pause()
        app.screen_change_signal.subscribe(app, lambda shown: opened.append(type(shown).__name__))
        typed(pilot, *keys)
        for _ in range(500):
            await pilot.pause(0.01)
            if app._exit:
                break
        assert app._exit
        await pilot.pause(0.05)
    return opened


def test_the_keys_are_those_of_every_screen() -> None:
    assert {"c", "R", "A", "question_mark", "slash", "m", "h", "n"} <= set(KEYS)


@pytest.mark.parametrize("screen", "1234567")
async def test_no_key_after_q_does_anything(tmp_path: Path, screen: str) -> None:
    assert await screens_after(tmp_path, screen, "q", *"clear", *KEYS) == []


@pytest.mark.parametrize("key", ["c", "R", "question_mark", "enter"])
async def test_q_right_after_a_key_closes_the_view(tmp_path: Path, key: str) -> None:
    await screens_after(tmp_path, "5", key, "q")


@pytest.mark.parametrize("size", [(4, 2), (1, 1)])
async def test_a_terminal_of_a_few_cells_is_no_crash(tmp_path: Path, size: tuple[int, int]) -> None:
    assert await screens_after(tmp_path, "1", *"234567", "q", size=size)
