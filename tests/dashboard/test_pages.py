"""A run as one HTML file: it opens without a network, stays small, and nothing in a name is markup."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from builders import device_memory, rank, run, summary
from hypothesis import given, strategies as st
from plotly.utils import PlotlyJSONEncoder

from zeromon.cli import main
from zeromon.readout.report import render_run
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.memory import Risk
from zeromon.storage.run_store import Store
from zeromon.storage.step_history.rows import row_of
from zeromon.storage.step_history.writer import Writer, rows_frame
from zeromon_dashboard import plotly_figures
from zeromon_dashboard.charts import (
    FEW,
    MAX_POINTS,
    Chart,
    Mark,
    charts_of,
    plotly_figure,
    reduce_points,
    traces_by_rank,
)
from zeromon_dashboard.html_report import run_page
from zeromon_dashboard.page import Known, Page
from zeromon_dashboard.pages import memory, overview, ranks as ranks_page
from zeromon_dashboard.url_state import Route

EVIL = "<script>alert('x')</script>\"'&"


def steps(ranks: int, count: int, **facts: object) -> dict[str, list[int]]:
    rows = [row_of(r, summary(n, **facts), 0) for r in range(ranks) for n in range(1, count + 1)]
    return rows_frame(rows).to_dict(as_series=False)


def hostile() -> RunSnapshot:
    remedy = Remedy(cause=EVIL, dialect=EVIL, diff=f"- {EVIL}\n+ {EVIL}", effect=EVIL, price=EVIL)
    found = Finding(rule="x", code=EVIL, severity="warning", text=EVIL, rank=0, remedy=remedy)
    one = rank(0, strategy=EVIL, device=EVIL, unit=EVIL, exception=EVIL)
    return run(one, run=EVIL, node=EVIL, command=("python", EVIL), findings=(found,))


class Tags(HTMLParser):
    """What tags a page has, and where they lead."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.scripts += tag == "script"


def tags(page: str) -> Tags:
    parser = Tags()
    parser.feed(page)
    return parser


def test_names_of_a_run_are_text() -> None:
    """As many scripts as a run with plain names has; the name itself is there, escaped."""
    series = steps(2, 10)
    plain = tags(run_page(run(rank(0)), series, render_run(run(rank(0)))))
    snapshot = hostile()
    page = run_page(snapshot, series, render_run(snapshot))
    assert tags(page).scripts == plain.scripts
    assert EVIL not in page
    assert page.count("&lt;script&gt;alert(&#x27;x&#x27;)") >= 8


def test_the_page_asks_for_nothing_from_elsewhere_and_stays_small() -> None:
    page = run_page(run(rank(0)), steps(8, 2000), render_run(run(rank(0))))
    assert [link for link in tags(page).links if not link.startswith("#")] == []
    assert not re.search(r"@import|url\(", page.partition("<script>")[0])
    assert len(page.encode()) < 2_200_000


def test_the_verdict_comes_first_and_a_finding_has_its_diff() -> None:
    remedy = Remedy(cause="c", dialect="Python", diff="- old\n+ new", frees_bytes=1 << 30, price="p")
    found = Finding(rule="x", code="ZM206", severity="warning", text="t", rank=3, remedy=remedy)
    snapshot = run(rank(0, failed=True, alive=False, ended="SIGKILL"), findings=(found,))
    page = run_page(snapshot, steps(1, 5), render_run(snapshot))
    body = page.partition("<body>")[2]
    answers = ("SIGKILL", "What does a step wait for?", "What do I change?", "ZM206",
               "Step time", "Will it run out of memory?", "In numbers")  # fmt: skip
    places = [body.index(answer) for answer in answers]
    assert places == sorted(places)
    assert '<span class="out">- old\n</span>' in body and '<span class="in">+ new\n</span>' in body
    assert "1.0 GiB less per rank" in body


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=5000))
def test_what_is_left_out_is_not_seen(values: list[float | None]) -> None:
    """The extremes stay, in order, and there are no more points than asked for."""
    x, y = reduce_points(list(range(len(values))), values)
    assert len(x) == len(y) <= MAX_POINTS + 2
    assert x == sorted(x)
    known = [v for v in values if v is not None]
    if known:
        shown = [v for v in y if v is not None]
        assert (max(shown), min(shown)) == (max(known), min(known))


def test_many_ranks_are_their_highest_and_lowest() -> None:
    series = steps(9, 3)
    column = [float(r * 10 + s) for r, s in zip(series["rank"], series["step"], strict=True)]
    found = traces_by_rank(series, column)
    assert found["highest rank"] == ([1, 2, 3], [81.0, 82.0, 83.0])
    assert found["median rank"] == ([1, 2, 3], [41.0, 42.0, 43.0])
    assert found["lowest rank"] == ([1, 2, 3], [1.0, 2.0, 3.0])
    assert list(traces_by_rank(steps(2, 3), [0.0] * 6)) == ["rank 0", "rank 1"]


def test_idle_steps_say_nothing_of_exposed_time_and_unknown_memory_is_absent() -> None:
    on_host, on_device = run(rank(0)), run(rank(0, memory_device=device_memory()))
    assert charts_of(steps(1, 5, idle=True), on_host)["exposed"].traces == {}
    shown = charts_of(steps(1, 5), on_host)["exposed"]
    assert shown is not None and shown.traces["rank 0"][1] == [10.0] * 5
    host = charts_of(steps(1, 5), on_host)["memory"]
    assert host is not None and host.title == "Host memory (RSS)"
    series = steps(1, 5, reserved_bytes=2 << 30, allocated_bytes=1 << 30)
    device = charts_of(series, on_device)["memory"]
    assert device is not None and device.title == "Device memory, reserved"
    assert device.traces["rank 0"][1] == [2.0] * 5 and device.traces["allocated"][1] == [1.0] * 5
    assert charts_of(steps(1, 5, rss_bytes=-1), on_host)["memory"].traces == {}


@pytest.mark.parametrize("kept", [True, False])
def test_report_writes_the_page_from_the_history_or_the_last_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path))
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    snapshot = run(rank(0), ended=True)
    Store().save(snapshot)
    if kept:
        rows = [row_of(0, summary(n), 0) for n in range(1, 1501)]
        Writer(Store().history(snapshot.run)).append(rows)
    assert main(["report", snapshot.run, "-o", str(tmp_path / "r.html")]) in (0, 1)
    page = (tmp_path / "r.html").read_text()
    assert "Step time" in page and "zeromon" in page
    assert main(["report", snapshot.run, "-o", str(tmp_path / "absent" / "r.html")]) == 2


@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "google-chrome"))), reason="no browser")
def test_a_picture_of_the_page_is_drawn_where_a_browser_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path))
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    Store().save(run(rank(0), ended=True))
    snapshot = tmp_path / "run.png"
    assert main(["report", "train-1", "-o", str(snapshot)]) in (0, 1)
    content = snapshot.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 20_000
    assert int.from_bytes(content[16:20], "big") == 1160
    monkeypatch.setenv("PATH", "")
    assert main(["report", "train-1", "-o", str(snapshot)]) == 2
    assert "needs Chromium" in capsys.readouterr().err


def test_the_line_of_an_event_ends_below_the_name_of_a_level() -> None:
    trace = {"rank 0": ([1.0, 2.0, 3.0], [1.0, 2.0, 4.0])}
    chart = Chart(
        "memory", "GiB", trace, 10.0, (Mark("capacity", None, (5.0, 5.0)),), events=((2, "e"),)
    )
    layout = chart.figure()["layout"]
    level, event = layout["shapes"]
    assert event["x0"] == event["x1"] == 2
    assert event["y1"] * layout["yaxis"]["range"][1] < level["y0"] == 5.0  # of the axis, from 0
    (plain,) = replace(chart, marks=()).figure()["layout"]["shapes"]
    assert plain["y1"] == 1


def test_a_long_title_goes_on_below_and_its_figure_is_as_much_taller() -> None:
    short, long = (plotly_figure([], title, 200)["layout"] for title in ("step time", "word " * 15))
    assert short["title"]["text"] == "step time" and short["height"] == 200
    lines = long["title"]["text"].split("<br>")
    assert len(lines) == 2 and max(map(len, lines)) <= 46
    added = long["height"] - short["height"]
    assert added == long["margin"]["t"] - short["margin"]["t"] > 0
    assert plotly_figure([], "", 200)["layout"]["margin"]["t"] < short["margin"]["t"]


def test_few_steps_have_a_mark_each() -> None:
    """Else plotly writes the number of a single step at each of five marks."""
    one, many = (
        plotly_figures.own_time_figure(run(*(rank(r, recent=known) for r in (0, 1))), {"rank": []})
        for known in ((summary(7),), tuple(map(summary, range(1, 2 * FEW))))
    )
    assert one is not None and one["layout"]["xaxis"]["dtick"] == 1
    assert many is not None and "dtick" not in many["layout"]["xaxis"]


def test_the_report_keeps_the_room_of_its_charts() -> None:
    """A number in a style is in pixels, as on the live page."""
    snapshot = run(rank(0))
    body = run_page(snapshot, steps(2, 10), render_run(snapshot)).partition("<body>")[2]
    heights = re.findall(r'style="min-height:([^"]*)"', body)
    assert heights and all(re.fullmatch(r"[1-9]\d*px", height) for height in heights)


def test_long_rows_of_the_report_are_wrapped() -> None:
    snapshot = run(rank(0))
    long = replace(snapshot, command=("python", *(f"--option-{n}=value" for n in range(40))))
    page = run_page(long, steps(1, 5), render_run(long))
    numbers = page.partition("class='numbers'")[2].partition("</pre>")[0]
    assert "--option-39=value" in numbers
    assert max(map(len, numbers.splitlines())) <= 150


# ---- figures of the chosen ranks -------------------------------------------------------------------


def texts(part: object) -> str:
    """All the text of a page's part."""
    encoded = json.dumps(part, cls=PlotlyJSONEncoder)
    return " | ".join(re.findall(r'"(?:children|title)": "([^"]*)"', encoded))


def cards_of(page: Page) -> list[str]:
    return [texts(own) for name, own in page.parts.items() if name.startswith("card-") and texts(own)]


def fleet() -> RunSnapshot:
    """Rank 11 is the nearest to its limit, rank 21 waits most."""
    near = Risk(pool="device", ratio=0.5, cause="growth", steps_left=100.0, used_bytes=65 << 30,
                capacity_bytes=80 << 30)  # fmt: skip
    return run(
        rank(
            11,
            memory_device=device_memory(reserved_bytes=65 << 30, capacity_bytes=80 << 30),
            risks=(near,),
        ),
        rank(21, memory_device=device_memory(reserved_bytes=42 << 30, capacity_bytes=80 << 30),
             exposed_ratio=0.9, exposed_seconds=0.09),
    )  # fmt: skip


@pytest.mark.parametrize(("chosen", "reserved"), [((), 65), ((21,), 42)])
def test_every_card_of_memory_is_of_one_rank_and_says_which(
    chosen: tuple[int, ...], reserved: int
) -> None:
    """The nearest to its limit, or the one that was chosen."""
    snapshot = fleet()
    where = Route(run=snapshot.run, page="memory", ranks=chosen)
    cards = cards_of(memory.content(Known(where, snapshot, steps(1, 3))))
    number = chosen[0] if chosen else 11
    assert len(cards) == 4
    assert all(f"rank {number}" in card for card in cards[1:])
    assert f"{reserved}.0 GiB" in cards[1]
    assert (f"rank {number}" in cards[0]) if number == 11 else ("n/a" in cards[0])


@pytest.mark.parametrize("chosen", [(), (11,), (21,)])
def test_every_figure_of_the_overview_is_of_the_chosen_ranks(chosen: tuple[int, ...]) -> None:
    """Also the bars of where a step goes, and each mean says over which steps."""
    snapshot = fleet()
    where = Route(run=snapshot.run, page="overview", ranks=chosen, steps=(2, 3))
    page = overview.content(Known(where, snapshot, steps(1, 3)))
    shown = chosen or (11, 21)
    waits = json.dumps(page.parts["waits"], cls=PlotlyJSONEncoder)
    assert {int(found) for found in re.findall(r"rank (\d+)", waits)} == {*shown}
    assert page.parts["waits-window"]["children"] == "mean of the last 20 steps"
    read = Known(where, replace(snapshot, origin="http://p:9090", every_seconds=15.0), steps(1, 3))
    window = overview.content(read).parts["waits-window"]["children"]
    assert window == "mean of the last 60 s"
    bars = page.parts["breakdown"]["figure"]
    assert bars["data"][0]["y"] == [f"rank {number}" for number in shown]
    assert "mean of the last 20" in bars["layout"]["title"]["text"]
    table = ranks_page.content(Known(replace(where, page="ranks"), snapshot, {}))
    assert [row["rank"] for row in table.parts["rank-table"]["rowData"]] == list(shown)


def test_a_card_without_a_value_is_not_drawn() -> None:
    """Without a device nothing is pinned for it, and the page is of the host."""
    snapshot = run(rank(0, memory_device=None, rss_bytes=1 << 30, pinned_bytes=-1))
    page = memory.content(Known(Route(run=snapshot.run, page="memory"), snapshot, steps(1, 3)))
    assert [card.split(" | ")[0] for card in cards_of(page)] == ["OOM risk", "Resident"]
    assert "nothing is on a device" in page.parts["within"]["figure"]["layout"]["title"]["text"]
    of_device = memory.content(Known(Route(run="x", page="memory"), fleet(), steps(1, 3)))
    title = of_device.parts["within"]["figure"]["layout"]["title"]["text"].replace("<br>", " ")
    assert "nothing is on a device" not in title


def test_nothing_is_said_of_stragglers_before_a_rank_reports() -> None:
    for snapshot, sentence in ((run(), "n/a (no rank has reported)"), (run(rank(0)), "No straggler")):
        page = ranks_page.content(Known(Route(run=snapshot.run, page="ranks"), snapshot, {}))
        assert sentence in texts(page.parts["stragglers"])
