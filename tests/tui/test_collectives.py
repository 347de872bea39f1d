"""The collectives of the last steps on a screen: what is drawn where, keys, and what cannot be read."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from recordings import RINGS
from tui.snapshots import FixedSource, snapshot
from tui.test_tui import Make, make, running, screen_text, until

from zeromon.base.errors import SourceError
from zeromon.readout.text import communication_of
from zeromon.snapshot.step import Lanes, LaneSpan, Stream
from zeromon.tui import drawing as drawn
from zeromon.tui.app import ZeromonApp
from zeromon.tui.line import plain_text
from zeromon.tui.screens.collectives import SpanLanes

__all__ = ["make"]


def span(begin: int, end: int, **facts: object) -> LaneSpan:
    known: dict[str, object] = {
        "rank": 0, "step": 1, "stream": Stream.COMMUNICATION, "name": "all_gather", "unit": "a",
        "group": "world", "exposed_ns": 0, "nbytes": 0, "on_device": False,
    }  # fmt: skip
    return LaneSpan(begin_ns=begin, end_ns=end, **(known | facts))  # type: ignore[arg-type]


def test_a_span_is_drawn_where_it_was_and_its_exposed_part_at_its_end() -> None:
    axis = drawn.Axis(0, 100, 10)
    one = span(20, 60, exposed_ns=20)
    assert plain_text(drawn.draw_span_lane([one], [one], axis, letters=True)) == "  ==xx    "
    phase = span(0, 100, stream=Stream.COMPUTE, name="forward")
    assert plain_text(drawn.draw_span_lane([phase], [one], axis, letters=True)) == "FFFFxxFFFF"
    outside = [span(-50, -1), span(101, 200)]
    assert plain_text(drawn.draw_span_lane(outside, outside, axis, letters=True)) == " " * 10
    short = plain_text(drawn.draw_span_lane([span(55, 55)], [], axis, letters=True))
    assert short == "     =    "  # what lasted less than a cell is seen
    assert plain_text(drawn.draw_span_pointer(one, axis)) == "  ▼──▼    "
    assert plain_text(drawn.draw_span_pointer(None, axis)).strip() == ""


async def opened(app: ZeromonApp, pilot: object) -> SpanLanes:
    await pilot.press("4", "enter")  # type: ignore[attr-defined]
    await until(pilot, lambda: bool(app.screen.query(SpanLanes)))  # type: ignore[arg-type]
    box = app.screen.query_one(SpanLanes)
    await until(pilot, lambda: box.lanes is not None or bool(box.trouble))  # type: ignore[arg-type]
    return box


async def test_enter_on_the_timeline_shows_units_and_who_came_last(make: Make) -> None:
    app = make(snapshot(2))
    async with running(app) as pilot:
        await opened(app, pilot)
        text = screen_text(app)
        assert "steps 58 to 60: rank 1 came last to" in text
        for part in ("layers.0 all_gather", "layers.2 reduce_scatter", "rank 0", "rank 1", "▏59"):
            assert part in text
        await pilot.press("escape")
        assert "enter: times" in screen_text(app)


async def test_keys_select_collectives_and_choose_steps(make: Make) -> None:
    app = make(snapshot(2))
    async with running(app) as pilot:
        box = await opened(app, pilot)
        assert box.lanes is not None
        own = communication_of(box.lanes, 0)
        await pilot.press("n")
        assert box.selected == own[0]
        await pilot.press("N")
        assert box.selected == own[-1]
        await pilot.press("e")
        assert box.selected == max(own, key=lambda one: one.exposed_ns)
        assert "exposed" in screen_text(app) and "rank 1 came last" in screen_text(app)
        for _ in range(6):
            await pilot.press("plus")
        assert box.selected is not None
        newest = max(step.end_ns for step in box.lanes.steps)
        ago = (newest - (box.selected.begin_ns + box.selected.end_ns) / 2) / 1e9
        assert box.back <= ago <= box.back + box.seconds  # what is selected is in sight
        await pilot.press("n", "N")
        assert box.back <= ago <= box.back + box.seconds
        await pilot.press("right_square_bracket", "right_square_bracket", "n")
        assert box.selected is not None and box.selected.rank == 1
        await pilot.press("s")
        await until(pilot, lambda: len({step.step for step in _lanes(box).steps}) == 10)


def _lanes(box: SpanLanes) -> Lanes:
    assert box.lanes is not None
    return box.lanes


async def test_what_cannot_be_read_is_said(make: Make) -> None:
    class Without(FixedSource):
        def lanes(self, steps: int, ranks: object = ()) -> Lanes:
            raise SourceError("no single collectives here", "Open the run on a node.")

    app = make(Without(snapshot(2)))
    async with running(app, 80, 24) as pilot:
        await opened(app, pilot)
        assert "no single collectives here. Open the run on a node." in screen_text(app)


async def test_nothing_in_the_rings_is_said(make: Make) -> None:
    class Empty(FixedSource):
        def lanes(self, steps: int, ranks: object = ()) -> Lanes:
            none = super().lanes(1)
            return replace(none, steps=(), spans=(), arrivals=(), left_out=())

    app = make(Empty(snapshot(2)))
    async with running(app, 80, 24) as pilot:
        await opened(app, pilot)
        assert "no ring of this run is on this node" in screen_text(app)
        await pilot.press("plus", "left", "n", "e", "home", "down")


async def test_the_spans_are_a_table_of_their_own(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (RINGS / "straggler-data").is_dir()
    app = make(snapshot(2))
    async with running(app) as pilot:
        box = await opened(app, pilot)
        await pilot.press("x")
        await until(pilot, lambda: bool(list(tmp_path.glob("*collectives*.csv"))))
        (path,) = tmp_path.glob("*collectives*.csv")
        rows = list(csv.DictReader(path.read_text().splitlines()))
        assert len(rows) == len(_lanes(box).spans)
        assert {row["unit"] for row in rows} >= {"layers.0", "layers.1", "layers.2"}
