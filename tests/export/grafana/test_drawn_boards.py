"""The boards as a reader sees them: drawn by Grafana's own components from what a Prometheus answers.

The screenshots are in build/grafana/screenshots.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")

from fleet import CAPACITY, Moving, used_bytes
from grafana_boards.panels import PART_COLOURS, SEVERITY_COLOURS
from grafana_drawing import (
    BROWSER,
    BUILD,
    MISSING,
    MUST_DRAW,
    Drawn,
    Moment,
    answers,
    backfilled,
    draw,
    hue,
    panels_of,
)
from playwright.sync_api import sync_playwright
from watched_runs import SCRAPE_SECONDS, Scrape, scrapes

from zeromon.export.prometheus import rules
from zeromon.readout.verdict import judge_run
from zeromon.snapshot.levels import COLLECTOR_CPU, CPU_WAIT, EXPOSED, IN_FLIGHT_SECONDS, OOM, Level
from zeromon.snapshot.run import Health

pytestmark = pytest.mark.skipif(
    bool(MISSING) and not MUST_DRAW, reason=f"not installed: {', '.join(MISSING)}"
)

BOARDS = {path.stem.removeprefix("zeromon-"): json.loads(path.read_text()) for path in rules.BOARDS}
LIVE, ENDED = True, False
CASES = {
    "healthy": ("healthy", LIVE), "slow": ("slow", LIVE), "hung": ("hung", LIVE),
    "stopped": ("hung", ENDED), "dead": ("dead", ENDED), "fleet": ("fleet", LIVE),
}  # fmt: skip
"""A name -> the recording, and whether the board is looked at while it lives or after its end."""
DRAWN = (
    ("healthy", "run"), ("slow", "run"), ("hung", "run"), ("stopped", "run"), ("dead", "run"),
    ("slow", "rank"), ("slow", "unit"), ("dead", "fleet"), ("fleet", "fleet"), ("fleet", "rank"),
)  # fmt: skip
LIGHT = {("dead", "run"), ("slow", "rank")}
LEVELS: dict[str, Level] = {
    "Exposed now": EXPOSED, "OOM risk now": OOM, "Waits for a CPU": CPU_WAIT,
    "In flight": IN_FLIGHT_SECONDS, "Collectors' CPU": COLLECTOR_CPU, "Most exposed nodes": EXPOSED,
    "Exposed communication by rank": EXPOSED, "OOM risk by rank": OOM,
}  # fmt: skip
NOW = {
    "Step time now", "Exposed now", "OOM risk now", "Steps until out of memory", "Waits for a CPU",
    "In flight", "MFU now", "Tokens or samples a second",
}  # fmt: skip
NODES, RANKS = 8, 8


@cache
def recorded(name: str) -> tuple[Scrape, ...]:
    """The scrapes of a run, or of 64 synthetic ranks on eight nodes over 40 seconds."""
    if name != "fleet":
        return tuple(scrapes(name))
    began = 1_790_000_000.0
    nodes = [Moving(name, number, RANKS, NODES * RANKS, began) for number in range(NODES)]
    return tuple(
        Scrape(
            node.view_at(at), Health(runs=1, ticks=1, busy_seconds=(at - began) / 100, last_tick_wall=at)
        )
        for at in (began + 500 + SCRAPE_SECONDS * number for number in range(9))
        for node in nodes
    )


def seen(case: str) -> Scrape:
    """The last scrape before the board of *case* is looked at."""
    name, lives = CASES[case]
    return [scrape for scrape in recorded(name) if not (lives and scrape.run.ended)][-1]


@pytest.fixture(scope="module")
def boards() -> Iterator[Callable[[str, str], dict[str, Drawn]]]:
    """Every board of DRAWN, by case and board."""
    assert not MISSING, f"not installed: {', '.join(MISSING)}"
    screenshots = BUILD / "screenshots"
    screenshots.mkdir(parents=True, exist_ok=True)
    drawn: dict[tuple[str, str], dict[str, Drawn]] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        for name in {name for name, _ in CASES.values()}:
            with backfilled(recorded(name)) as server:
                for case, kind in DRAWN:
                    if CASES[case][0] == name:
                        drawn[case, kind] = _draw(browser, server, case, kind, screenshots)
        browser.close()
    yield lambda case, kind: drawn[case, kind]


def _draw(browser: Any, server: Any, case: str, kind: str, screenshots: Path) -> dict[str, Drawn]:
    first = recorded(CASES[case][0])[0].at
    ranks = "[0-9]|1[0-5]" if case == "fleet" else ".+"
    moment = Moment(first - 30, seen(case).at, run=CASES[case][0], rank=ranks)
    is_dark = (case, kind) not in LIGHT
    screenshot = screenshots / f"{case}-{kind}-{'dark' if is_dark else 'light'}.png"
    page = browser.new_page()
    asked = answers(server, BOARDS[kind], moment)
    panels = draw(page, BOARDS[kind], asked, moment, dark=is_dark, screenshot=screenshot)
    page.close()
    return panels


Boards = Callable[[str, str], dict[str, Drawn]]


# ---- the first panel and the present ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "kind", "word", "colour"),
    [
        ("healthy", "run", "healthy", "green"), ("slow", "run", "slow", "orange"),
        ("hung", "run", "stalled", "red"), ("stopped", "run", "stopped", "red"),
        ("dead", "run", "dead", "red"),
        ("dead", "fleet", "dead", "red"), ("fleet", "fleet", "at risk", "red"),
    ],
)  # fmt: skip
def test_the_first_panel_shows_the_present_verdict_alone(
    boards: Boards, case: str, kind: str, word: str, colour: str
) -> None:
    (title, health), *_ = boards(case, kind).items()
    assert title == "Health"
    assert health.words == [f"{CASES[case][0]}: {word}"]
    assert "gradient" in health.texts[0]["background"]
    assert hue(health.series[0]["stroke"]) == colour
    if case != "fleet":  # whose verdict each node has for its own ranks
        assert judge_run(seen(case).run).health == word


@pytest.mark.parametrize("case", ["stopped", "dead"])
def test_nothing_is_shown_as_now_after_the_end(boards: Boards, case: str) -> None:
    """What is unknown says why, in the colour of plain text: nothing is green beside the red verdict."""
    panels = boards(case, "run")
    assert panels.keys() >= NOW
    for title in NOW:
        (text,) = panels[title].texts
        assert re.fullmatch(r"n/a \(.+\)", text["text"]), title
        assert hue(text["colour"]) == "grey", title
    stats = [panel for panel in panels.values() if panel.type == "stat"]
    assert not [panel.title for panel in stats for text in panel.texts if hue(text["colour"]) == "green"]
    assert not panels["Ranks of a hang"].series
    # A run that its user stopped has none
    assert panels["Failed ranks"].words == ["2" if case == "dead" else "0"]
    assert hue(panels["Failed ranks"].texts[0]["colour"]) == ("red" if case == "dead" else "grey")


def test_a_hang_is_named_while_it_lasts(boards: Boards) -> None:
    """The rank that is missing, the age of the collective, and no step time of before."""
    panels = boards("hung", "run")
    words = panels["Ranks of a hang"].words
    assert words[:5] == ["group", "kind", "op", "rank", "role"]
    assert words[-5:][2:] == ["all_gather", "1", "missing"]
    assert panels["Step time now"].words == ["n/a (no step ends)"]
    in_flight = panels["In flight"].value
    assert in_flight is not None
    assert in_flight >= IN_FLIGHT_SECONDS.warning
    causes = {line["name"]: line["value"] for line in panels["Ledger"].series}
    assert causes["hang"] == pytest.approx(1.0, abs=0.01)


# ---- shares and axes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "kind"), DRAWN)
def test_no_share_is_above_all(boards: Boards, case: str, kind: str) -> None:
    """Neither an axis nor a stack goes over 100 %."""
    units = {
        panel["title"]: panel["fieldConfig"]["defaults"].get("unit") for panel in panels_of(BOARDS[kind])
    }
    charts = [
        panel
        for panel in boards(case, kind).values()
        if panel.type == "timeseries" and units[panel.title] == "percentunit" and panel.series
    ]
    assert charts
    for panel in charts:
        assert panel.axis[0] == "0%", panel.title
        assert float(panel.axis[-1].rstrip("%")) <= 100, panel.title
        if panel.title in ("Phases", "Ledger"):
            heights: Counter[int] = Counter()
            for line in panel.series:
                heights.update({time: value or 0.0 for time, value in line["points"]})
            assert 0.9 < max(heights.values()) < 1.03, panel.title


@pytest.mark.parametrize("kind", ["run", "rank"])
def test_memory_by_role_is_of_one_rank(boards: Boards, kind: str) -> None:
    stacked = sum(line["value"] for line in boards("slow", kind)["Memory by role"].series)
    roles = [
        sum(role.device_bytes + role.host_bytes + role.disk_bytes for role in rank.memory.roles)
        for rank in seen("slow").run.ranks
    ]
    assert stacked == max(roles) > 0


@pytest.mark.parametrize(("case", "kind"), DRAWN)
def test_amounts_begin_at_zero(boards: Boards, case: str, kind: str) -> None:
    """An axis that begins elsewhere makes much of little."""
    floats = {"Measured minus predicted", "Loss"}
    for panel in boards(case, kind).values():
        if panel.axis and panel.title not in floats:
            assert re.match(r"0\b", panel.axis[0]), (panel.title, panel.axis)


def test_a_bar_is_as_long_as_its_share(boards: Boards) -> None:
    panel = boards("fleet", "fleet")["Most exposed nodes"]
    assert len(panel.series) == NODES
    for bar in panel.series:
        assert bar["percent"] == pytest.approx(bar["value"])
        assert bar["last"].endswith("%")


# ---- colours ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "kind"), DRAWN)
def test_a_figure_has_the_colour_of_a_finding_about_it(boards: Boards, case: str, kind: str) -> None:
    """Also in the panels that are not drawn, whose colours Grafana's libraries tell."""
    for panel in boards(case, kind).values():
        for figure in panel.series if panel.type in ("stat", "bargauge", "status-history") else ():
            if panel.title in LEVELS:
                severity = LEVELS[panel.title].severity(figure["value"])
                expected = SEVERITY_COLOURS[severity] if severity else "green"
                assert hue(figure["stroke"]) == expected, panel.title
                assert panel.type != "stat" or hue(panel.texts[0]["colour"]) == expected, panel.title


@pytest.mark.parametrize(("case", "kind"), DRAWN)
def test_one_name_has_one_colour(boards: Boards, case: str, kind: str) -> None:
    """A phase, a cause, a run and a rank in all panels; red is only what ends a run."""
    colours: dict[str, set[str]] = {}
    for panel in boards(case, kind).values():
        for line in panel.series if panel.type == "timeseries" else ():
            labels = line["labels"]
            name = line["name"]
            if (
                part := labels.get("cause") or labels.get("phase")
                if panel.title in ("Phases", "Ledger")
                else None
            ):
                assert line["stroke"] == PART_COLOURS[part]
                assert (hue(line["stroke"]) == "red") == (part in ("hang", "dead", "lost"))
            rank = re.fullmatch(r"rank (\d+)( \w+)?", name)
            if rank and "kind" not in labels and "role" not in labels:
                colours.setdefault(f"rank {rank[1]}", set()).add(line["stroke"])
            if name == CASES[case][0]:
                colours.setdefault(name, set()).add(line["stroke"])
    assert colours or kind == "unit"
    assert {name: len(found) for name, found in colours.items() if len(found) > 1} == {}
    assert not [
        name for name, (found,) in colours.items() if name.startswith("rank") and hue(found) == "red"
    ]


def test_what_compute_communication_waiting_and_own_code_look_like() -> None:
    hues = {name: hue(colour) for name, colour in PART_COLOURS.items()}
    assert {hues[name] for name in ("compute", "forward", "backward", "optimizer")} == {"blue"}
    assert (hues["exposed"], hues["waiting"], hues["other"]) == ("violet", "orange", "grey")
    assert {name for name, found in hues.items() if found == "red"} == {"hang", "dead", "lost"}


@pytest.mark.parametrize(("case", "kind"), [("hung", "run"), ("dead", "run"), ("fleet", "fleet")])
def test_a_severity_has_its_colour(boards: Boards, case: str, kind: str) -> None:
    cells = [
        text for text in boards(case, kind)["Findings"].texts if text["text"] in set(SEVERITY_COLOURS)
    ]
    assert {cell["text"] for cell in cells} >= {"critical", "info"}
    for cell in cells:
        assert (
            hue(cell["colour"])
            == {str(word): colour for word, colour in SEVERITY_COLOURS.items()}[cell["text"]]
        )


# ---- texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "kind"), DRAWN)
def test_no_text_is_cut(boards: Boards, case: str, kind: str) -> None:
    cut = [
        (panel.title, text["text"])
        for panel in boards(case, kind).values()
        for text in panel.texts
        if text["cut"]
    ]
    assert not cut


def test_figures_have_units(boards: Boards) -> None:
    """As a person writes them: 400 ms, not 0.4; 23.9 %, not 0.239."""
    words = boards("fleet", "fleet")["Runs"].words
    assert words[:2] == ["run", "live ranks"]
    row = dict(zip(words[:8], words[8:], strict=True))
    assert re.fullmatch(r"\d+ ms", row["step time"])
    assert re.fullmatch(r"\d+\.\d%", row["exposed, worst rank"])
    assert row["OOM risk, worst rank"] == f"{100 * used_bytes(11, 540) / CAPACITY:.1f}%"
    assert row["latest rank"] == "21 ms"


def test_what_the_libraries_do_not_draw(boards: Boards) -> None:
    """docs/how-to/grafana.md names it."""
    texts = {
        (panel.type, *panel.words)
        for kind in ("run", "rank", "unit")
        for panel in boards("slow", kind).values()
    }
    assert {kind for kind, *words in texts if words == [f"{kind}: not in Grafana's libraries"]} == {
        "heatmap",
        "status-history",
    }
