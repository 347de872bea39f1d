"""Pure parts: lines, charts, bars, heat maps, lanes, filters, tables, trends, plots."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import MS, changed, rank, run, summary
from hypothesis import given, strategies as st
from rich.color import Color
from tui.snapshots import GIB, snapshot

from zeromon.base.units import byte_scale, human_ratio
from zeromon.diagnosis.engine import advise
from zeromon.readout import tables
from zeromon.readout.answers import bar_of_rank
from zeromon.readout.breakdown import PARTS, USUAL, rank_parts, step_parts
from zeromon.readout.figures import LATE
from zeromon.readout.rank_map import Cell, RankMap, map_ranks
from zeromon.readout.tables import RANK_COLUMNS, TRAFFIC_COLUMNS
from zeromon.readout.text import leading_clauses, run_state
from zeromon.readout.verdict import Health, Verdict
from zeromon.ring.codes import Phase
from zeromon.snapshot import Finding, RankSnapshot
from zeromon.snapshot.communication import InFlight
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.focus import most_exposed_of
from zeromon.snapshot.levels import Severity
from zeromon.snapshot.memory import Risk
from zeromon.snapshot.rank import DETACHED
from zeromon.tui import drawing, plots, status_text
from zeromon.tui.app import verdict_announcement
from zeromon.tui.columns import (
    DisplayOptions,
    TableExport,
    csv_text,
    fit_columns,
    header_line,
    nice_ceiling,
    parse_rank_filter as wanted_by,
    row_spans,
    sort_rows,
    svg_without_fonts,
)
from zeromon.tui.drawing import (
    HEAT_LEVELS,
    Curve,
    Plot,
    draw_chart,
    draw_gauge,
    draw_heat_map,
    draw_legend,
    fit_mesh_cells,
    stacked_bar,
)
from zeromon.tui.event_log import events_between_snapshots, opening_entries
from zeromon.tui.line import (
    cells,
    clean,
    cut_line,
    fit,
    line_width,
    pad_line,
    plain_text,
    text_tail,
    wrap_text,
)
from zeromon.tui.plots import Trend, step_of
from zeromon.tui.screens.communication import arrival_lines, pick_latest_ranks, sum_rows_by_field
from zeromon.tui.screens.findings import finding_page
from zeromon.tui.screens.memory import peaks_within_step, role_bars
from zeromon.tui.screens.overview import change_lines, legend_of_parts, waits_lines
from zeromon.tui.screens.text import lines_of_markdown, lines_of_report
from zeromon.tui.styles import style_of_tone
from zeromon.tui.view_model import ViewModel, draw_scrubber, status_line

HOSTILE = (
    "name\x1b[31m\x07\n\ttab",
    "日本語のとても長い名前" * 20,
    "👩‍👩‍👧‍👦🏳️‍🌈" * 30,
    "[bold red]markup[/] [@click=app.quit]x[/]",
    "‮override⁦ ​zero",
    "e\u0301" * 300,
    "u" * 300,
    "\u00a0" * 100,
    "\u3000" * 100 + "日本語",
)

HOSTILE_NAMES = (
    "controls", "wide", "joined", "markup", "overrides", "combining", "long", "unbroken", "ideographic"
)  # fmt: skip

# ---- lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE, ids=HOSTILE_NAMES)
@pytest.mark.parametrize("width", [0, 1, 2, 7, 40])
def test_any_text_takes_exactly_its_cells(text: str, width: int) -> None:
    """Controls, joiners, overrides, wide and combining characters included."""
    shown = clean(text)
    assert cells(fit(shown, width)) == width
    assert cells(fit(shown, width, right=True)) == width
    assert cells(text_tail(shown, width)) <= width
    assert line_width(pad_line([(shown, ""), (shown, "bad")], width)) == width
    assert all(line_width(line) <= max(8, width) for line in wrap_text(text, width))
    assert not any(sign in shown for sign in "\x1b\n\t\r\x07‮​")


@given(st.lists(st.tuples(st.text(), st.just("")), max_size=5), st.integers(0, 50))
def test_a_cut_line_is_never_too_long(spans: list[tuple[str, str]], width: int) -> None:
    line = [(clean(text), tone) for text, tone in spans]
    assert line_width(cut_line(line, width)) <= width


def test_wrapping_keeps_every_word() -> None:
    text = "one two three four " + "x" * 50
    joined = "".join(plain_text(line) for line in wrap_text(text, 12)).replace(" ", "")
    assert joined == text.replace(" ", "")


# ---- charts --------------------------------------------------------------------------------------


def drawn(points: list[tuple[float, float]], x: tuple[float, float], width: int = 17) -> list[str]:
    plot = Plot(
        curves=(Curve("a", "s0", points),), x=x, y=(0.0, 10.0), axis=lambda v: f"{v:g}",
        foot=("first", "last"), marks=(x[0],),
    )  # fmt: skip
    return [plain_text(line) for line in draw_chart(plot, width, 5)]


def test_a_line_goes_from_its_first_value_to_its_last() -> None:
    lines = drawn([(0, 0.0), (10, 10.0)], (0, 10), 40)
    assert lines[0].startswith("    10 ")
    marked = [[at for at, sign in enumerate(line[7:]) if sign != " "] for line in lines[:4]]
    assert marked[0][-1] == 32
    assert marked[3][0] == 0
    assert marked[3][-1] <= marked[0][0] + 1
    assert lines[3].startswith("     0 ")
    assert lines[4].strip().startswith("first▲")
    assert lines[4].endswith("last")


def test_a_chart_that_does_not_fit_is_not_drawn() -> None:
    assert drawn([(0, 1.0)], (0, 1), 9) == []
    assert all(len(line) == 17 for line in drawn([(0, 1.0), (1, 2.0)], (0, 1)))


def test_a_chart_draws_what_is_beyond_its_ends_at_them() -> None:
    inside, beyond = drawn([(0, 10.0)], (0, 10)), drawn([(0, 99.0)], (0, 10))
    assert inside == beyond
    assert drawn([(-5, 1.0), (50, 1.0)], (0, 10))  # columns outside are passed over


def test_a_legend_names_curves_and_newest_values() -> None:
    plot = Plot(
        curves=(
            Curve("rank 0", "s0", [(1, 2.0), (2, 3.5)]),
            Curve("ahead", "forecast", [(2, 9.0)], gap=2),
        ),
        x=(1, 2), y=(0, 10), axis=lambda v: f"{v:g}", unit="GiB",
    )  # fmt: skip
    assert plain_text(draw_legend(plot, 40)).strip() == "━ rank 0 3.5 GiB  ╌ ahead"
    assert plain_text(draw_legend(plot, 20)).strip() == "━ rank 0 3.5 GiB", "a name is not cut"


def test_axes_end_on_round_numbers() -> None:
    found = [nice_ceiling(v) for v in (0, 0.3, 1, 7, 12, 80, float("inf"))]
    assert found == pytest.approx([1.0, 0.3, 1.0, 8, 15, 80, 1.0])


# ---- bars ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=7), st.integers(1, 120))
def test_a_stacked_bar_is_as_long_as_the_sum_of_its_parts(sizes: list[float], width: int) -> None:
    """To half a cell, whatever the parts are."""
    whole = sum(sizes) or 1.0
    line = stacked_bar([(PARTS[i], size) for i, size in enumerate(sizes)], whole, width)
    assert line_width(line) == width
    filled = sum(len(t) * (1 if set(t) == {"█"} else 0.5) for t, _ in line if t.strip())
    assert filled == pytest.approx(width if sum(sizes) else 0, abs=0.5 * len(line))


def test_parts_have_letters_where_there_is_no_colour() -> None:
    line = stacked_bar([("forward", 2.0), ("exposed", 1.0), ("other", 1.0)], 4.0, 8, letters=True)
    assert plain_text(line) == "FFFFxx--"


def test_a_gauge_shows_what_was_predicted() -> None:
    assert plain_text(draw_gauge(5, 10, 10, "s0", limit=8)) == "█████──┃──"
    assert plain_text(draw_gauge(0.001, 10, 4, "s0")) == "█───"
    assert plain_text(draw_gauge(20, 10, 4, "s0", letters=True)) == "####"


def test_bars_say_where_a_step_goes() -> None:
    """Phases less what they wait for, and that waiting: together the step."""
    one = snapshot(2).ranks[0]
    parts = rank_parts(one)
    timed = [s for s in one.steps.recent[-20:] if not s.idle]
    assert sum(parts.values()) == pytest.approx(sum(s.seconds for s in timed) / len(timed), rel=1e-6)
    assert parts["exposed"] == pytest.approx(sum(s.exposed_ns for s in timed) / len(timed) / 1e9)
    bars = [bar_of_rank(one)]
    lines = [plain_text(line) for line in waits_lines(bars, DisplayOptions(), 100, with_text=True)]
    assert lines[0].startswith("rank 0")
    assert "communication" in lines[-1]


def test_exposed_time_that_was_not_timed_by_phase_is_not_drawn() -> None:
    untimed = summary(1, idle=True, phase_exposed_ns=(0, 5 * MS, 0, 0, 0, 0))
    assert step_parts(untimed)["exposed"] == 0
    bare = rank(recent=(summary(1),))
    assert bar_of_rank(bare).segments[0].name == "compute and communication"


def test_with_many_ranks_the_most_exposed_are_shown() -> None:
    chosen = most_exposed_of(snapshot(64).ranks, 4)
    assert [r.rank for r in chosen] == [0, 16, 32, 48]


# ---- the map of ranks ----------------------------------------------------------------------------


def map_of(count: int, each: int = 8) -> RankMap:
    """Ranks that are late by 0, 1 ... 39 ms."""
    ranks = [rank(n, node=f"node{n // each}", late_seconds=n % 40 / 1000) for n in range(count)]
    return map_ranks(run(*ranks), LATE, ranks)


@pytest.mark.parametrize(
    ("count", "width", "height", "has_numbers"),
    [
        (1, 76, 10, True), (8, 76, 10, True), (64, 76, 11, True), (64, 116, 21, True),
        (1024, 196, 33, True), (1024, 116, 21, False), (1024, 76, 11, False), (4000, 76, 11, False),
    ],
)  # fmt: skip
def test_every_rank_has_a_cell_on_the_map(
    count: int, width: int, height: int, has_numbers: bool
) -> None:
    ranks_map = map_of(count)
    mesh = fit_mesh_cells(ranks_map, LATE.unit, width, height, height // 2)
    lines = draw_heat_map(ranks_map, mesh, count - 1)
    assert len(lines) == mesh.rows <= height
    assert all(line_width(line) <= width for line in lines)
    assert bool(mesh.numbers) is has_numbers
    for index in (0, count // 2, count - 1):
        y, x = mesh.place(index)
        assert mesh.index(x, y) == index // mesh.ranks_per_cell * mesh.ranks_per_cell
        if has_numbers:
            shown = plain_text(lines[y])[x : x + mesh.cell]
            assert shown.strip(" ▸") == f"{index % 40}.0"
            assert ("▸" in shown) is (index == count - 1)
            assert mesh.index(0, y) is None  # a heading is no rank


def test_a_cell_of_several_ranks_shows_the_highest_and_who_is_blamed() -> None:
    cells_ = [Cell(rank(n), 1.0 if not n else 0.0, is_blamed=n == 63) for n in range(64)]
    ranks_map = RankMap({"a": cells_}, 0.5, 0.5, "rank 63 awaited in a hang")
    mesh = fit_mesh_cells(ranks_map, LATE.unit, 8, 0, 1)
    assert (mesh.ranks_per_cell, mesh.cell) == (8, 1)
    line = draw_heat_map(ranks_map, mesh, letters=True)[0]
    assert plain_text(line) == "█" + "▁" * 6 + "✖"
    assert line[-1][1] == "blamed"


def test_what_is_not_known_has_no_shade() -> None:
    ranks_map = map_ranks(run(), LATE, [rank(0, late_seconds=None), rank(1, late_seconds=0.0)])
    line = draw_heat_map(ranks_map, fit_mesh_cells(ranks_map, LATE.unit, 76, 9, 9))[0]
    assert [(text.strip(), tone) for text, tone in line[1:3]] == [("n/a", "faint"), ("0.0", "heat3")]
    blocks = fit_mesh_cells(ranks_map, LATE.unit, 8, 0, 1)
    assert plain_text(draw_heat_map(ranks_map, blocks, letters=True)[0]) == "?▄"


@pytest.mark.parametrize("background", ["dark", "light"])
def test_the_numbers_of_the_map_are_legible(background: str) -> None:
    """At least 4.5:1, the contrast that WCAG asks of text."""

    def luminance(style_color: Color | None) -> float:
        assert style_color is not None
        parts = [value / 255 for value in style_color.get_truecolor()]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for tone in (*(f"heat{level}" for level in range(HEAT_LEVELS)), "blamed"):
        style = style_of_tone(tone, background)
        low, high = sorted((luminance(style.color), luminance(style.bgcolor)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, tone


# ---- lanes ---------------------------------------------------------------------------------------


def test_a_step_stands_where_it_was_and_a_gap_is_a_gap() -> None:
    first = summary(1, start_ns=0, end_ns=100, phase_ns=(0, 50, 50, 0, 0, 0))
    second = summary(2, start_ns=200, end_ns=300, phase_ns=(0, 100, 0, 0, 0, 0))
    line = plain_text(drawing.draw_step_lane([first, second], 0, 400, 8, letters=True))
    assert line == "FB  FF  "
    assert plain_text(
        drawing.draw_step_numbers(((s.step, s.start_ns, s.end_ns) for s in (first, second)), 0, 400, 16)
    ).split() == ["▏1", "▏2"]


def test_communication_lanes_show_what_is_hidden_and_what_is_exposed() -> None:
    one = summary(1, start_ns=0, end_ns=100, communication_ns=75, exposed_ns=25)
    assert plain_text(drawing.draw_communication([one], 0, 100, 8, letters=True)) == "====xx  "
    by_phase = replace(one, phase_ns=(0, 50, 50, 0, 0, 0), phase_exposed_ns=(0, 0, 25, 0, 0, 0))
    assert plain_text(drawing.draw_step_lane([by_phase], 0, 100, 8, letters=True)) == "FFFFBBxx"
    assert plain_text(drawing.draw_communication([by_phase], 0, 100, 8, letters=True)) == "    ==xx"
    idle = replace(by_phase, idle=True)
    assert plain_text(drawing.draw_step_lane([idle], 0, 100, 8, letters=True)) == "FFFFBBBB"
    assert plain_text(drawing.draw_communication([idle], 0, 100, 8, letters=True)) == "????????"


def test_a_step_begins_with_the_wait_for_its_batch() -> None:
    spent = [0] * len(Phase)
    spent[Phase.FORWARD], spent[Phase.DATA_WAIT], spent[Phase.OTHER] = 50, 25, 25
    one = summary(1, start_ns=0, end_ns=100, phase_ns=tuple(spent))
    assert plain_text(drawing.draw_step_lane([one], 0, 100, 8, letters=True)) == "ddFFFF--"


def test_the_ruler_counts_back_from_now() -> None:
    text = plain_text(drawing.draw_ruler(0, 4_000_000_000, 80, drawing.age_labels(4_000_000_000)))
    assert text.split() == ["-4.00", "s", "-3.00", "s", "-2.00", "s", "-1.00", "s", "now"]


# ---- filters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", range(16)), ("3", [3]), ("0-2,9", [0, 1, 2, 9]), ("exposed>20", [0, 1]),
        ("exposed>=20 0-1", [0, 1]), ("node01", range(8, 16)), ("layers.5", [5, 11]),
        ("risk>50%", [3]), ("memory<63", [0, 1, 8, 9]), ("late>0.02", [1]), ("nothing", []),
        ("rank=7", [7]), ("unknown>3", []), ("step>0.4365", [14, 15]),
    ],
)  # fmt: skip
def test_a_filter_lets_through_what_it_says(text: str, ranks: list[int]) -> None:
    test = wanted_by(text)
    through = [r.rank for r in snapshot(16).ranks if test is None or test(r)]
    assert through == list(ranks)


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [70, 78, 120, 300])
@pytest.mark.parametrize("text", HOSTILE, ids=HOSTILE_NAMES)
def test_rows_and_headers_are_as_wide_as_the_table(width: int, text: str) -> None:
    one = changed(snapshot(2).ranks[0], unit=text, node=text, phase=text)
    row = row_spans(fit_columns(RANK_COLUMNS, width), one)
    assert (
        line_width(row)
        == line_width(header_line(fit_columns(RANK_COLUMNS, width), "rank", down=False))
        <= width
    )


def test_where_there_is_no_room_what_matters_least_goes_first() -> None:
    names = {width: [c.name for c, _ in fit_columns(RANK_COLUMNS, width)] for width in (60, 78, 300)}
    assert names[300] == [c.name for c in RANK_COLUMNS]
    assert set(names[78]) - set(names[60])
    for shown in names.values():
        assert {"rank", "state", "step", "share", "memory", "risk"} <= set(shown)


def test_rows_are_ordered_and_the_unknown_comes_last() -> None:
    ranks = snapshot(4).ranks
    ranks = (changed(ranks[0], exposed_ratio=None), *ranks[1:])
    assert [r.rank for r in sort_rows(RANK_COLUMNS, ranks, "share", down=True)] == [1, 2, 3, 0]
    assert [r.rank for r in sort_rows(RANK_COLUMNS, ranks, "share", down=False)] == [3, 2, 1, 0]
    assert sort_rows(RANK_COLUMNS, ranks, "no such column", down=True) == list(ranks)


def test_a_file_has_base_units_and_no_formulas() -> None:
    """A spreadsheet takes text that begins with =, +, - or @ for a formula."""
    names = ("=cmd()", "+1", "-1", "@x", "plain")
    ranks = [changed(snapshot(1).ranks[0], unit=name, exposed_ratio=None) for name in names]
    rows = list(csv.DictReader(io.StringIO(csv_text(TableExport("ranks", RANK_COLUMNS, ranks)))))
    assert [row["unit"] for row in rows] == ["'=cmd()", "'+1", "'-1", "'@x", "plain"]
    assert rows[0]["share_ratio"] == ""
    assert float(rows[0]["exposed_seconds"]) == pytest.approx(0.095)
    assert int(rows[0]["memory_bytes"]) == ranks[0].memory.device.reserved_bytes  # type: ignore[union-attr]


def test_rows_are_added_up_and_bandwidths_are_not() -> None:
    traffic = snapshot(1).ranks[0].communication.traffic
    found = {row.op: row for row in sum_rows_by_field(traffic, "op")}
    assert set(found) == {"all_gather", "reduce_scatter"}
    gathers = [row for row in traffic if row.op == "all_gather"]
    assert found["all_gather"].seconds == pytest.approx(sum(row.seconds for row in gathers))
    assert found["all_gather"].unit == "(several)"
    assert found["all_gather"].busbw_bytes_per_second is None
    assert found["reduce_scatter"].phase == "backward"
    assert sum_rows_by_field(traffic, "unit") == list(traffic)
    assert "(several)" in plain_text(row_spans(fit_columns(TRAFFIC_COLUMNS, 160), found["all_gather"]))


def test_a_screenshot_loads_nothing_from_elsewhere() -> None:
    svg = '<style>@font-face { src: url("https://cdn/x.woff2") } .a { fill: red }</style>'
    assert "https" not in svg_without_fonts(svg)
    assert ".a { fill: red }" in svg_without_fonts(svg)


# ---- trends and plots ----------------------------------------------------------------------------


def test_a_trend_reads_each_step_once() -> None:
    reads = 0

    def read(step: object) -> float:
        nonlocal reads
        reads += 1
        return float(step.step)  # type: ignore[attr-defined]

    ranks, trend = snapshot(8).ranks, Trend(read)
    bands = trend.bands(ranks, 101)
    assert [band.step for band in bands] == list(range(101, 161))
    assert bands[-1][1:] == (160.0, 160.0, 160.0, 8 * 160.0)
    before, reads = reads, 0
    trend.bands(ranks, 101)
    assert before == 60 * 8
    assert reads == 2 * 8  # the two newest, which other ranks may still change


def test_a_trend_of_very_many_ranks_comes_newest_first() -> None:
    ranks, trend = snapshot(8).ranks, Trend(lambda step: float(step.step))
    assert [b.step for b in trend.bands(ranks, 1, reads=80)] == list(range(151, 161))
    assert trend.bands(ranks, 1, reads=80)[0].step < 151


def test_a_step_is_found_though_steps_are_missing() -> None:
    recent = tuple(summary(n) for n in (1, 2, 5, 9))
    assert [found.step if (found := step_of(recent, n)) else None for n in (1, 3, 5, 9, 10)] == [
        1, None, 5, 9, None,
    ]  # fmt: skip
    assert step_of((), 1) is None


def plotted(
    name: str,
    ranks: Sequence[RankSnapshot],
    trends: plots.Trends | None = None,
    look: DisplayOptions | None = None,
) -> Plot:
    """The chart called *name*, 60 cells wide."""
    return plots.plots_by_name(ranks, trends or plots.Trends(), look or DisplayOptions(), 60, ())[
        name
    ].plot


def test_few_ranks_have_a_line_each_and_many_a_band() -> None:
    for count, names in (
        (2, ["rank 0", "rank 1", "forecast"]),
        (8, ["max", "median", "min", "forecast"]),
    ):
        found = plotted("memory", snapshot(count).ranks)
        assert [curve.name for curve in found.curves] == names
    alone = plotted("memory", snapshot(8).ranks[3:4])
    assert [curve.name for curve in alone.curves] == ["reserved", "allocated", "forecast"]
    assert alone.levels == ((80.0 * GIB, "capacity"),)
    last, then = alone.curves[2].points
    assert last == (160, snapshot(8).ranks[3].memory.device.reserved_bytes)  # type: ignore[union-attr]
    assert (then[1] - last[1]) / (then[0] - last[0]) == pytest.approx(GIB / 9)


def test_ranks_without_a_device_share_the_host() -> None:
    """Their sum is what its limit is for."""
    ranks = tuple(rank(n, recent=tuple(summary(s) for s in range(1, 30))) for n in range(3))
    plot = plotted("memory", ranks)
    assert [c.name for c in plot.curves] == ["sum", "rank 0", "rank 1", "rank 2"]
    assert plot.curves[0].points[-1] == (29, 3 * GIB)


def test_a_step_that_some_ranks_have_yet_to_end_has_no_sum() -> None:
    """Else the line of all of them falls at its newest point."""
    behind = rank(1, recent=tuple(summary(s) for s in range(1, 28)))
    ahead = rank(0, recent=tuple(summary(s) for s in range(1, 30)))
    trends = plots.Trends()
    plot = plotted("memory", (ahead, behind), trends)
    assert plot.curves[0].points[-1] == (27, 2 * GIB)
    caught_up = changed(behind, recent=ahead.steps.recent)
    plot = plotted("memory", (ahead, caught_up), trends)
    assert plot.curves[0].points[-1] == (29, 2 * GIB)


def test_shares_and_windows() -> None:
    ranks = snapshot(2).ranks
    share = plotted("exposed", ranks, look=DisplayOptions(shares=True, window=60))
    assert share.x == (101, 160)
    step = ranks[0].steps.recent[-2]
    assert share.curves[0].points[-1][1] == pytest.approx(
        step.exposed_ns / (step.end_ns - step.start_ns)
    )
    assert (share.unit, share.axis(0.25)) == ("%", "25")
    memory = plotted("memory", ranks, look=DisplayOptions(shares=True))
    assert memory.axis(80.0 * GIB) == "100"


# ---- words ---------------------------------------------------------------------------------------


def test_the_danger_in_one_sentence() -> None:
    run_shown = snapshot(8)
    text = plain_text(status_text.verdict_line(run_shown))
    assert text == (
        " ▲ rank 3 runs out of device memory at about step 308, in 64 s: "
        "unsharded params grow 113.8 MiB per step"
    )
    short = plain_text(status_text.verdict_line(run_shown, 80))
    assert short == " ▲ rank 3: device memory full at ~step 308", "no clause is cut"


def test_what_an_ended_run_was_in_danger_of_is_not_said_to_be_unknown() -> None:
    ranks = tuple(changed(r, risks=()) for r in snapshot(2).ranks)
    calm = replace(snapshot(2), ranks=ranks, findings=())
    assert "limit is not known" in plain_text(status_text.verdict_line(calm))
    assert plain_text(status_text.verdict_line(replace(calm, ended=True))).startswith(
        " · no problem found; exposed communication"
    )


def test_of_ranks_that_died_the_first_is_named() -> None:
    """The one that the verdict names, though its number is not the lowest."""
    first, second = (
        changed(one, failed=True, ended=how, last_event_ns=at)
        for one, how, at in zip(snapshot(2).ranks, ("exception", "SIGKILL"), (9, 5), strict=True)
    )
    died = tuple(
        Finding(rule="rank_died", code="ZM001", severity="critical", rank=n, text=f"{n} is dead")
        for n in (0, 1)
    )
    gone = replace(snapshot(2), ended=True, ranks=(first, second), findings=died)
    assert plain_text(status_text.verdict_line(gone)) == " ✖ rank 1: 1 is dead"
    assert "dead · rank 1, SIGKILL, after step 160; rank 0 failed, too" in plain_text(
        status_text.head_line(gone)
    )


def test_a_run_that_its_user_stopped_is_no_failure() -> None:
    """Ctrl-C: no red sign, nothing critical in the log."""
    live = snapshot(2)
    first, second = (
        changed(one, alive=False, failed=True, ended="exception", exception="KeyboardInterrupt: ")
        for one in live.ranks
    )
    stopped = replace(live, ended=True, ranks=(first, second), findings=())
    assert not [finding for finding in advise(stopped) if finding.rule == "rank_died"]
    line = status_text.head_line(stopped)
    assert "■" in plain_text(line) and "stopped · by Ctrl-C after step" in plain_text(line)
    assert not {tone for text, tone in [*line, *status_text.verdict_line(stopped)]} & {"bad", "good"}
    assert not {note.tone for note in events_between_snapshots(live, stopped)} & {"bad"}


def test_a_detached_run_is_not_said_to_run() -> None:
    """What its ranks do is not known: nothing is green or live."""
    live = snapshot(2)
    left = replace(live, ranks=tuple(changed(r, ended=DETACHED, risks=()) for r in live.ranks))
    line = status_text.head_line(left)
    assert "detached after step" in plain_text(line) and "running" not in plain_text(line)
    assert "is not known" in plain_text(status_text.verdict_line(left))
    assert not {tone for text, tone in [*line, *status_text.verdict_line(left)]} & {"bad", "good"}
    model = ViewModel(
        run=left, ranks=left.ranks, look=DisplayOptions(), trends=plots.Trends(),
        newest_wall=left.taken_wall,
    )  # fmt: skip
    assert plain_text(status_line(model, left.taken_wall)).strip() == "detached"
    assert any("the agent has left" in note.text for note in events_between_snapshots(live, left))
    ranks = tuple(changed(r, ended="detached, then finished", alive=False) for r in left.ranks)
    assert "the run has ended since" in run_state(replace(left, ranks=ranks, ended=True))


def test_the_hosts_memory_has_no_limit_that_moves_with_its_neighbours() -> None:
    """What is available is named as that, and a risk without a cause names none."""
    risk = Risk(pool="host", ratio=0.0, cause="none", used_bytes=GIB, capacity_bytes=9 * GIB)
    text = status_text.level_and_cause(risk)
    assert text == "1.0 GiB in use by all ranks, 8.0 GiB available"


def _warning(rule: str, number: int, severity: str = "warning") -> Finding:
    return Finding(rule=rule, code="ZM1", severity=severity, rank=number, text=f"{rule} {number}")


def test_that_another_rank_is_the_worst_now_is_no_news() -> None:
    before = replace(snapshot(2), findings=(_warning("a", 0), _warning("b", 0)))
    after = replace(before, findings=(_warning("a", 1), _warning("c", 1)))
    said = [note.text for note in events_between_snapshots(before, after)]
    assert said == ["ZM1 rank 1: c 1", "ZM1 no longer: b"]
    severe = [replace(before, findings=(_warning("oom", number, "critical"),)) for number in (0, 1)]
    assert [note.text for note in events_between_snapshots(*severe)] == [
        "ZM1 rank 1: oom 1", "ZM1 rank 0: no longer: oom",
    ]  # fmt: skip


def test_nor_is_it_in_what_was_recorded() -> None:
    def known(rule: str, number: int, came: float, gone: float | None) -> Finding:
        return Finding(
            rule=rule, rank=number, code="ZM1", severity="warning", text=rule, came=came, gone=gone
        )

    past = (
        known("a", 0, 1.0, 2.0), known("a", 1, 2.0, 3.0), known("b", 1, 2.5, 4.0),
        known("a", 0, 3.0, 5.0), known("a", 1, 6.0, None),
    )  # fmt: skip
    said = [(note.wall, note.text) for note in opening_entries(snapshot(2), past) if note.wall < 10]
    assert said == [
        (1.0, "ZM1 rank 0: a"), (2.5, "ZM1 rank 1: b"), (4.0, "ZM1 no longer: b"),
        (5.0, "ZM1 no longer: a"), (6.0, "ZM1 rank 1: a"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.012, 0.03, "-12.0 ms per step"), (0.0, 0.03, "up to -30.0 ms"), (None, None, "see below")],
)
def test_what_a_change_is_expected_to_do(low: float | None, high: float | None, said: str) -> None:
    remedy = Remedy(cause="c", dialect="d", diff="", gain_low_seconds=low, gain_high_seconds=high)
    finding = replace(_warning("a", 0), remedy=remedy)
    assert said in plain_text(row_spans(fit_columns(tables.FINDING_COLUMNS, 100), finding))


def test_the_first_line_says_how_old_the_picture_is() -> None:
    made = snapshot(2)
    model = ViewModel(
        run=made,
        ranks=made.ranks,
        look=DisplayOptions(),
        trends=plots.Trends(),
        newest_wall=made.taken_wall,
    )
    now = made.taken_wall + 12
    assert plain_text(status_line(model, made.taken_wall + 1)).strip() == "● live"
    assert plain_text(status_line(model, now)).strip() == "▲ 12 s old"
    assert plain_text(status_line(replace(model, trouble="gone"), now)).strip() == "▲ 12 s old: gone"
    ended = replace(model, run=replace(made, ended=True), trouble="gone")  # so is its collector
    assert plain_text(status_line(ended, now)).strip() == "ended 00:17:50"
    back = replace(model, run=replace(made, taken_wall=1000.0), paused=True)
    assert plain_text(status_line(back, now)).strip() == "⏸ paused 00:16:40, 70 s behind"
    line = plain_text(draw_scrubber(replace(back, span=(980.0, 1020.0)), 60))
    assert (line.index("●"), line.strip()[:8], line.strip()[-8:]) == (30, "00:16:20", "00:17:00")


def test_tokens_and_mfu_are_only_said_where_they_are_known() -> None:
    """6 FLOPs a parameter and token, over what the devices can do at most."""
    facts = {
        "framework": "fsdp2", "stage": 3, "ranks": 2, "numel": 7_000_000_000, "trainable": 7_000_000_000,
        "shard_numel": 3_500_000_000, "trainable_shard_numel": 3_500_000_000, "param_bytes": 4,
        "compute_bytes": 2, "grad_bytes": 4, "matrix_numel": 6_500_000_000, "attention": 0,
    }  # fmt: skip
    ranks = tuple(changed(r, models=(facts,), mean_seconds=0.5) for r in snapshot(2).ranks)
    made = run(*ranks)
    assert "MFU" not in {name for name, _, _ in status_text.run_figures(made, DisplayOptions())}
    told = DisplayOptions(tokens_per_step=8192, peak_flops=989e12)
    assert status_text.tokens_per_second(made, told) == 16384
    used = 6 * 6.5e9 * 16384 / (2 * 989e12)
    assert {n: v for n, v, _ in status_text.run_figures(made, told)}["MFU"] == human_ratio(used)
    wrong = replace(told, peak_flops=1e12)
    assert "over 100 %" in {n: v for n, v, _ in status_text.run_figures(made, wrong)}["MFU"]
    two = run(*(changed(r, models=(facts, facts)) for r in ranks))
    assert "MFU" not in {name for name, _, _ in status_text.run_figures(two, told)}


def test_units() -> None:
    assert byte_scale(5 * GIB) == (GIB, "GiB")
    assert byte_scale(5 << 40) == (1 << 40, "TiB")
    assert byte_scale(0) == (1, "B")


# ---- memory and arrivals -------------------------------------------------------------------------


def test_roles_stand_beside_their_prediction() -> None:
    lines = [plain_text(line) for line in role_bars(snapshot(2).ranks[0], DisplayOptions(), 90)]
    assert any(line.startswith("unsharded param") and "+921.6 MiB" in line for line in lines)
    assert any(line.startswith("optimizer state") and "as predicted" in line for line in lines)
    assert any("+1.4 GiB optimizer state: padding to equal shards" in line for line in lines)
    assert "no memory census yet" in plain_text(
        role_bars(rank(roles=(), expected=()), DisplayOptions(), 90)[0]
    )


def test_units_within_a_step() -> None:
    units = snapshot(2).ranks[0].communication.units
    assert len(peaks_within_step(units, DisplayOptions(), 60, 20)) == 6
    thinned = [plain_text(line) for line in peaks_within_step(units, DisplayOptions(), 60, 3)]
    assert ["41.0" in thinned[0], "46.0" in thinned[1], "40.0" in thinned[2]] == [True] * 3
    assert "no peak by unit is known" in plain_text(peaks_within_step((), DisplayOptions(), 90, 9)[0])
    (only,) = peaks_within_step([replace(units[0], fqn="")], DisplayOptions(), 60, 20)
    assert plain_text(only).startswith("(root) ")


def test_who_is_late_is_said_and_drawn() -> None:
    made = snapshot(8)
    lines = [plain_text(line) for line in arrival_lines(made, made.ranks, DisplayOptions(), 60, 14)]
    assert lines[0].startswith("rank 1: late by 19.0 ms per step (data wait) since step 101;")
    assert sum("ms" in line and line[0].isdigit() for line in lines) == 8
    assert "is matched yet" in plain_text(arrival_lines(run(), (), DisplayOptions(), 90, 9)[0])


def test_two_ranks_need_no_table_of_who_waits_for_whom() -> None:
    late = arrival_lines(snapshot(2), snapshot(2).ranks, DisplayOptions(), 60, 14)
    assert not any(plain_text(line)[:1].isdigit() for line in late)
    calm = replace(snapshot(2), stragglers=())
    (only,) = arrival_lines(calm, calm.ranks, DisplayOptions(), 60, 14)
    assert plain_text(only) == "no rank is late step after step"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (90, "a first clause; the second; and a third"),
        (38, "a first clause; the second"),
        (25, "a first clause"),
        (5, "a first clause"),
    ],
)
def test_a_sentence_loses_whole_clauses(width: int, shown: str) -> None:
    assert leading_clauses("a first clause; the second; and a third", width) == shown


def test_a_clause_does_not_end_within_parentheses() -> None:
    sentence = "all_reduce #7 of dp (ranks 0, 1; 4 kB) hung: rank 0 is late; rank 1 waits"
    assert leading_clauses(sentence, 10) == "all_reduce #7 of dp (ranks 0, 1; 4 kB) hung: rank 0 is late"
    assert leading_clauses("rank 1, exit code 17, after step 9", 20, ", ") == "rank 1, exit code 17"


def test_a_number_keeps_its_unit_on_its_line() -> None:
    rows = [plain_text(row) for row in wrap_text("the others wait 147.6 ms (66.2 %) per step", 24)]
    assert rows == ["the others wait 147.6 ms", "(66.2 %) per step"]
    assert [plain_text(row) for row in wrap_text("they wait for 147.6 ms", 20)][1] == "147.6 ms"


def test_an_emoji_selector_takes_no_cell() -> None:
    assert clean("GLHF! \U0001f3d6\ufe0f") == "GLHF! \U0001f3d6"


def test_the_state_at_the_top_is_cut_between_words_of_its_own() -> None:
    ended = tuple(changed(r, ended="SIGTERM", alive=False) for r in snapshot(2).ranks)
    for width in range(50, 120):
        head = plain_text(status_text.head_line(replace(snapshot(2), ranks=ended, ended=True), width))
        assert "…" not in head


def test_a_risk_continues_on_the_next_line() -> None:
    risk = snapshot(8).ranks[3].memory.risks[0]
    rows = [plain_text(row) for row in status_text.risk_lines("device risk  ", risk, "", 40)]
    assert len(rows) > 1 and all(len(row) <= 40 for row in rows)
    assert " ".join(" ".join(rows).split()) == "device risk 74.0 % " + status_text.level_and_cause(risk)


def test_what_the_end_of_a_run_cut_off_did_not_go_away() -> None:
    """The record ends all findings with the run; twice the same sentence is one entry."""
    lasting = Finding(rule="a", rank=0, code="ZM1", severity="warning", text="a", came=1.0, gone=9.0)
    shared = tuple(
        replace(lasting, rule="b", rank=rank, text="b", came=2.0, gone=3.0) for rank in (0, 1)
    )
    ended = replace(snapshot(2), findings=(lasting,), ended=True)
    entries = [note.text for note in opening_entries(ended, (lasting, *shared)) if note.wall < 10]
    assert entries == ["ZM1 rank 0: a", "ZM1 rank 0: b", "ZM1 rank 1: b", "ZM1 no longer: b"]


def test_the_page_of_a_finding_says_what_to_do() -> None:
    """The finding's own action, else what the page of the rule advises."""
    found = Finding(rule="stalled", code="ZM013", severity="critical", text="stalled", rank=-1)
    own = "\n".join(map(plain_text, finding_page(replace(found, action="Look at a.py:4."), 80)))
    assert "Look at a.py:4." in own and "No change" not in own
    assert "zeromon doctor" in "\n".join(map(plain_text, finding_page(found, 80)))


def test_a_change_is_wrapped_and_marked_where_it_goes_on() -> None:
    words = " ".join(["word"] * 60)
    found = Finding(rule="stalled", code="ZM013", severity="critical", text="x", rank=-1, action=words)
    shown = replace(snapshot(2), findings=(found, replace(found, rule="other", code="ZM014")))
    rows = [plain_text(row) for row in change_lines(shown, 2, 60)]
    assert rows[1].endswith("word …") and rows[2] == "   and 1 more finding: key 6"
    assert all(len(row) <= 62 for row in rows)
    calm = [plain_text(row) for row in change_lines(replace(snapshot(2), findings=()), 2, 60)]
    assert calm == ["nothing: no finding asks for it"]


def test_the_head_line_names_only_facts_that_fit() -> None:
    facts = ["fsdp2", "2 ranks", "on node00", "cuda"]
    begin, _, end = plain_text(status_text.head_line(snapshot(2), 200)).rpartition("  ")
    assert end.split(" · ") == facts
    for width in range(len(begin), len(begin) + len(end) + 2):
        line = plain_text(status_text.head_line(snapshot(2), width))
        shown = line.removeprefix(begin).split(" · ")
        assert len(line) <= width and [fact.strip() for fact in shown] in ([""], facts[: len(shown)])


@pytest.mark.parametrize("width", [28, 34, 44, 90])
def test_who_is_late_fits(width: int) -> None:
    """Heads stand over their figures, at 80x24, too."""
    made = replace(snapshot(8), stragglers=())
    lines = [plain_text(line) for line in arrival_lines(made, made.ranks, DisplayOptions(), width, 14)]
    assert all(len(line.rstrip()) <= width and "…" not in line for line in lines)
    assert all("ms" in line[-3:] for line in lines[1:])


def test_legends_of_a_step_fit_80_columns() -> None:
    parts = list(USUAL)
    assert "exposed communication" in plain_text(
        legend_of_parts([*parts, "hidden"], DisplayOptions(), 116)
    )
    short = plain_text(legend_of_parts([*parts, "hidden"], DisplayOptions(), 76))
    assert len(short) <= 76
    assert short.rstrip().endswith("own code  ■ hidden")


def test_collectives_in_flight_are_shown_the_oldest_first() -> None:
    def flying(age_ms: int) -> InFlight:
        return InFlight(op="all_gather", group="g", sequence=1, unit="", phase="forward", nbytes=1,
                        issued_ns=1000 * MS - age_ms * MS)  # fmt: skip

    ranks = [changed(rank(0), in_flight=(flying(1),)), changed(rank(1), in_flight=(flying(700),))]
    found = tables.list_flights(ranks, 1000 * MS)
    assert [(one.rank, one.seconds) for one in found] == [(1, 0.7), (0, 0.001)]


@pytest.mark.parametrize("background", ["dark", "light", "sixteen", "none"])
def test_every_tone_has_a_style_on_every_background(background: str) -> None:
    for tone in ("", "dim", "bad", "badge", "cursor", *PARTS, "forward|exposed", "heat0", "heat6"):
        made = style_of_tone(tone, background)
        if background == "none":
            assert made.color is None
            assert made.bgcolor is None
    assert style_of_tone("forward|exposed", "dark").bgcolor is not None


def test_the_terminal_is_told_of_a_new_verdict_once() -> None:
    """Title at once; bell and notification only for what becomes critical while somebody watches."""
    well = Verdict(Health.HEALTHY, None, "calm")
    dead = Verdict(Health.DEAD, Severity.CRITICAL, "died: rank 1\x1b]2;evil\x07")
    assert verdict_announcement("r", well, None) == "\x1b]2;healthy · r · zeromon\x07"
    assert not verdict_announcement("r", well, well)
    told = verdict_announcement("r", dead, well)
    assert told.startswith("\x1b]2;dead · r · zeromon\x07\x07\x1b]9;r dead: died: rank 1")
    assert told.count("\x1b") == 2  # a name cannot write to the terminal
    assert "\x1b]9;" not in verdict_announcement("r", dead, None)


def test_a_mark_stands_beside_the_numbers_below_a_chart() -> None:
    """It covered a digit: ``5▲3`` for 533."""
    for mark in range(533, 901):
        plot = Plot(
            curves=(), x=(533.0, 900.0), y=(0.0, 1.0), axis=str, ticks=(0.0, 1.0),
            foot=("step 533", "900"), marks=(float(mark),),
        )  # fmt: skip
        foot = "".join(text for text, _ in draw_chart(plot, 60, 8)[-1])
        assert foot.count("▲") == 1 and "step 533" in foot and foot.rstrip("▲ ").endswith("900")


def test_a_rule_is_drawn_as_its_page_and_long_lines_are_wrapped() -> None:
    text = "## Why\n\nA *long* sentence that " + "goes on and " * 12 + "ends.\n\n- one\n- two\n"
    lines = ["".join(part for part, _ in line) for line in lines_of_markdown(text, 40)]
    assert "Why" in "".join(lines) and "##" not in "".join(lines) and "*" not in "".join(lines)
    assert all(len(line) <= 40 for line in lines) and any("• one" in line for line in lines)
    report = "Title\n  finding  " + "word " * 30 + "\n  a  b  c  d" + " x" * 40
    drawn = ["".join(part for part, _ in line) for line in lines_of_report(report, 50)]
    assert all(len(line) <= 50 for line in drawn[:-1]) and len(drawn) > 4
    assert drawn[-1].startswith("  a  b  c  d"), "a row of a table stays whole"


def test_who_is_late_is_among_those_that_wait() -> None:
    """With 64 ranks and room for 8 only those that waited were there."""
    ranks = [rank(n, late_seconds=0.02 * (n == 1), wait_seconds=0.021 * (n != 1)) for n in range(64)]
    shown = pick_latest_ranks(ranks, 8)
    assert shown[0].rank == 1 and len(shown) == 8
