"""The boards of Grafana, as files: linted, and their colours by Grafana's own rule for thresholds."""

from __future__ import annotations

import bisect
import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")

from grafana_boards.boards import BOARDS, EVENTS
from grafana_boards.document import document
from grafana_boards.panels import NEUTRAL, SEVERITY_COLOURS, Dashboard
from grafana_drawing import panels_of
from prometheus_server import needs_promtool, promtool, series

from zeromon.cli import main
from zeromon.export.prometheus import rules
from zeromon.fold.state import STEP_BUCKETS
from zeromon.snapshot.levels import EXPOSED, OOM

FILES: dict[str, dict[str, Any]] = {board.uid: json.loads(document(board)) for board in BOARDS}
PANELS = [(uid, panel) for uid, made in FILES.items() for panel in panels_of(made)]


def colour(steps: list[dict[str, Any]], value: float) -> str:
    """As Grafana's getActiveThreshold: the last step, in order, that the value has reached."""
    active = steps[0]
    for step in steps:
        if step["value"] is None or value >= step["value"]:
            active = step
        else:
            break
    return active["color"]


GOOD_AND_BAD = {
    "Failed ranks": (0, "text", 5, "red"),
    "Oldest snapshot": (1, "green", 60, "red"),
    "Collectors' CPU": (0.02, "green", 0.9, "red"),
    "Exposed now": (0.02, "green", 0.4, "orange"),
    "OOM risk now": (0.0, "green", 1.0, "red"),
    "Steps until out of memory": (5000, "green", 3, "red"),
    "Waits for a CPU": (0.01, "green", 0.5, "red"),
    "In flight": (0, "green", 600, "red"),
    "Health": (0, "green", 3, "red"),
    "Most exposed nodes": (0.02, "green", 0.4, "orange"),
    "Exposed communication by rank": (0.02, "green", 0.4, "orange"),
    "OOM risk by rank": (0.0, "green", 1.0, "red"),
}
NEITHER = {
    "Live runs", "Live ranks", "Collectors", "Steps", "Step time now", "Least host memory left",
    "MFU now", "Goodput so far", "Tokens or samples a second",
}  # fmt: skip
"""Figures that no value of makes good or bad: plain text, whatever the value."""


def test_each_panel_of_one_colour_is_judged() -> None:
    """A stat, a bar or a cell without thresholds would be red from 80 on, which is Grafana's default."""
    coloured = {"stat", "bargauge", "status-history"}
    titles = {panel["title"] for _, panel in PANELS if panel["type"] in coloured}
    assert titles == set(GOOD_AND_BAD) | NEITHER


@pytest.mark.parametrize("title", sorted({*GOOD_AND_BAD, *NEITHER}))
def test_good_is_green_and_bad_is_not(title: str) -> None:
    """On every board that has the panel."""
    found = [panel for _, panel in PANELS if panel["title"] == title and panel["type"] != "timeseries"]
    assert found
    for panel in found:
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[0]["value"] is None
        assert all(a["value"] < b["value"] for a, b in pairwise(steps[1:]))
        if title in NEITHER:
            assert {colour(steps, value) for value in (0, 1, 79, 80, 1e12)} == {NEUTRAL[0][1]}
        else:
            good, its_colour, bad, other = GOOD_AND_BAD[title]
            assert (colour(steps, good), colour(steps, bad)) == (its_colour, other)


def test_thresholds_are_those_of_the_findings() -> None:
    """The colour of a value is that of a finding about it, and not a hundredth before."""
    for title, level in (("OOM risk now", OOM), ("Exposed now", EXPOSED)):
        (panel,) = [panel for _, panel in PANELS if panel["title"] == title]
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        for value in (level.warning, level.critical):
            severity = level.severity(value)
            assert severity is not None
            assert colour(steps, value) == SEVERITY_COLOURS[severity]
            assert colour(steps, value - 0.01) != colour(steps, value)


def test_cells_of_the_table_of_runs() -> None:
    """Failed ranks, exposed communication and OOM risk have a colour and their own unit."""
    (table,) = [panel for _, panel in PANELS if panel["title"] == "Runs"]
    cells = {
        over["matcher"]["options"]: {one["id"]: one["value"] for one in over["properties"]}
        for over in table["fieldConfig"]["overrides"]
    }
    for column, good, bad, colours in (
        ("failed ranks", 0, 1, ("text", "red")),  # none is no merit of a run that was stopped
        ("exposed, worst rank", 0.02, 0.4, ("green", "orange")),
        ("OOM risk, worst rank", 0, 1, ("green", "red")),
    ):
        steps = cells[column]["thresholds"]["steps"]
        assert (colour(steps, good), colour(steps, bad)) == colours
        assert cells[column]["custom.cellOptions"] == {"type": "color-text"}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_the_package_has_what_the_builder_makes(board: Dashboard) -> None:
    """Otherwise: python tools/make_boards.py"""
    (shipped,) = [path for path in rules.BOARDS if path.stem == board.uid]
    assert shipped.read_text() == document(board)


# ---- lint -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", FILES)
def test_a_board_is_linted(uid: str) -> None:
    """What Grafana's dashboard-linter asks: a source to choose, rates over the rate interval, units,
    legends; and a shared crosshair, events in every chart, links to boards that are here."""
    made = FILES[uid]
    assert made["graphTooltip"] == 1
    assert made["refresh"]
    assert [mark["name"] for mark in made["annotations"]["list"]] == [e.name for e in EVENTS]
    chosen = {variable["name"] for variable in made["templating"]["list"]}
    for mark in made["annotations"]["list"]:
        assert mark["enable"]
        assert mark["expr"]
        assert mark["titleFormat"]
        assert mark["datasource"]["uid"] == "${datasource}"
    for panel in panels_of(made):
        for target in panel["targets"]:
            for window in re.findall(r"(?:rate|increase)\([^\[]*\[(.*?)\]", target["expr"]):
                assert window == "$__rate_interval"
            assert 'run=~"$run"' in target["expr"] or "zeromon_collector_" in target["expr"]
    for url in re.findall(r'"url": "(/d/[^"]+)"', json.dumps(made).replace('\\"', "'")):
        board, _, values = url.removeprefix("/d/").partition("?")
        names = set(re.findall(r"var-(\w+)", values))
        assert names <= {v["name"] for v in FILES[board]["templating"]["list"]}
        assert set(re.findall(r"\$(\w+)", values)) <= chosen


def test_links_lead_from_the_fleet_to_a_run_and_from_there_to_a_rank() -> None:
    """By the row of a table, the bar of a node, the line of a rank."""
    text = {title: json.dumps(panel) for uid, panel in PANELS for title in [f"{uid} {panel['title']}"]}
    assert "/d/zeromon-run?" in text["zeromon-fleet Runs"]
    assert "var-run=${__value.raw}" in text["zeromon-fleet Runs"]
    assert "var-node=${__field.labels.node}" in text["zeromon-fleet Most exposed nodes"]
    assert "var-rank=${__field.labels.rank}" in text["zeromon-run Latest ranks"]
    assert "var-rank=${__value.raw}" in text["zeromon-run Ranks"]


@needs_promtool
def test_prometheus_reads_every_query(tmp_path: Path) -> None:
    """Panels and events, with the variables as Grafana fills them in."""
    exprs = [target["expr"] for _, panel in PANELS for target in panel["targets"]]
    exprs += [event.expr for event in EVENTS]
    rules = [{"record": f"board:query:{n}", "expr": filled(expr)} for n, expr in enumerate(exprs)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    assert f"{len(exprs)} rules found" in promtool("check", "rules", "--lint=none", path)


def filled(expr: str) -> str:
    for name, value in (("__rate_interval", "1m"), ("run", ".+"), ("rank", ".+"), ("node", ".+")):
        expr = expr.replace(f"${name}", value)
    assert "$" not in expr
    return expr


@needs_promtool
def test_events_are_marked_when_they_begin(tmp_path: Path) -> None:
    """For a minute, once; an event that lasts is not marked again."""
    seen = {
        "Start": ([series("zeromon_rank_up", "_x10 1x30")], 10, {"run": "r"}),
        "End": ([series("zeromon_rank_up", "1x9 0x30")], 10, {"run": "r"}),
        "Death": (
            [series("zeromon_rank_death", "_x10 1x30", cause="SIGKILL", role="culprit")],
            10, {"run": "r", "rank": "3", "cause": "SIGKILL"},
        ),
        "Findings": (
            [series("zeromon_finding", "_x10 1x30", rule="leak", severity="warning")],
            10, {"run": "r", "rule": "leak", "severity": "warning"},
        ),
    }  # fmt: skip
    (tmp_path / "none.yml").write_text("groups: []\n")
    tests = []
    for event in EVENTS:
        given, begins, labels = seen[event.name]
        pairs = ", ".join(f'{key}="{value}"' for key, value in labels.items())
        asked = [(begins - 1, []), (begins, [{"labels": f"{{{pairs}}}", "value": 1}]), (begins + 9, [])]
        tests.append({
            "interval": "1m", "input_series": given,
            "promql_expr_test": [
                {"expr": filled(event.expr), "eval_time": f"{at}m", "exp_samples": samples}
                for at, samples in asked
            ],
        })  # fmt: skip
    path = tmp_path / "events.yml"
    path.write_text(json.dumps({"rule_files": ["none.yml"], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- now is now, and figures side by side are of one rank ------------------------------------------


def answered(
    tmp_path: Path, scraped: list[dict[str, str]], asked: dict[str, list[dict[str, Any]]]
) -> None:
    """promtool holds the samples of each expression after ten minutes against those that are given."""
    (tmp_path / "none.yml").write_text("groups: []\n")
    tests = [
        {"expr": expr, "eval_time": "10m", "exp_samples": samples} for expr, samples in asked.items()
    ]
    file = {"rule_files": ["none.yml"], "tests": [
        {"interval": "15s", "input_series": scraped, "promql_expr_test": tests}
    ]}  # fmt: skip
    (tmp_path / "asked.yml").write_text(json.dumps(file))
    promtool("test", "rules", tmp_path / "asked.yml")


def expression(title: str, board: str = "zeromon-run", number: int = 0) -> str:
    (panel,) = [p for uid, p in PANELS if (uid, p["title"]) == (board, title)]
    return filled(panel["targets"][number]["expr"])


def test_a_stat_asks_for_the_present() -> None:
    """As a range, a stat shows the last value of a series that ended long ago."""
    asked = [t for _, p in PANELS if p["type"] in ("stat", "bargauge") for t in p["targets"]]
    assert asked
    assert all(target.get("instant") and not target.get("range") for target in asked)


@needs_promtool
def test_the_health_of_a_run_is_its_present_one(tmp_path: Path) -> None:
    """It was healthy, then at risk; now it is dead on one node and stopped on the other."""
    words = {"healthy": "1x20 0x20", "at risk": "0x20 1x10 0x10", "dead": "0x30 1x10", "slow": "0x40"}
    scraped = [series("zeromon_run_health", values, health=word) for word, values in words.items()]
    there = {"instance": "b:9417", "rank": 9}
    scraped += [
        series("zeromon_run_severity", "0x20 2x10 3x10"),
        series("zeromon_run_health", "0x30 1x10", health="stopped", **there),
        series("zeromon_run_severity", "0x30 1x10", **there),
    ]
    labels = '{health="dead", instance="a:9417", rank="3", run="r"}'
    answered(tmp_path, scraped, {expression("Health"): [{"labels": labels, "value": 3}]})


@needs_promtool
@pytest.mark.parametrize("lives", [True, False])
def test_nothing_is_shown_as_now_of_ranks_that_have_ended(tmp_path: Path, lives: bool) -> None:
    """Their collector answers on, with the last figures of a rank that died beside others."""
    gauges = {
        "Exposed now": "exposed_communication_ratio", "OOM risk now": "oom_risk_ratio",
        "Steps until out of memory": "oom_steps_left", "Waits for a CPU": "cpu_wait_ratio",
        "In flight": "collective_in_flight_seconds", "MFU now": "mfu_ratio",
    }  # fmt: skip
    scraped = [series(f"zeromon_{name}", "0.5x40") for name in gauges.values()]
    scraped += [
        series("zeromon_rank_up", f"{int(lives)}x40"),
        series("zeromon_step_seconds_sum", "0+15x40"),
        series("zeromon_step_seconds_count", "0+30x40"),
        series("zeromon_rank_info", "1x40", node="n1"),
        series("zeromon_host_memory_headroom_bytes", "9x40"),
    ]
    now = [{"labels": "{}", "value": 0.5}] if lives else []
    step = [{"labels": '{run="r"}', "value": 0.5}] if lives else []
    bars = {"Most exposed nodes": 0.5, "Least host memory left": 9}
    asked = {expression(title): now for title in gauges} | {expression("Step time now"): step}
    for title, value in bars.items():
        node = [{"labels": '{run="r", node="n1"}', "value": value}] if lives else []
        asked[expression(title, "zeromon-fleet")] = node
    answered(tmp_path, scraped, asked)


@needs_promtool
def test_memory_side_by_side_is_of_one_rank(tmp_path: Path) -> None:
    """Rank 1 reserves most, rank 2 has allocated more; 30 of 70 and 50 of 60 GB are no pair."""
    scraped = []
    for number, allocated, reserved, roles in ((1, 30, 70, (20, 10)), (2, 50, 60, (1, 9))):
        memory = {"allocated": allocated, "reserved": reserved, "capacity": 80}
        scraped += [
            series(f"zeromon_memory_{what}_bytes", f"{value}x40", rank=number)
            for what, value in memory.items()
        ]
        scraped += [
            series("zeromon_memory_role_bytes", f"{value}x40", rank=number, role=role, place="device")
            for role, value in zip(("param", "grad"), roles, strict=True)
        ]
    asked = {
        expression("Device memory", number=n): [{"labels": '{run="r"}', "value": value}]
        for n, value in enumerate((30, 70, 80))
    }
    for board in ("zeromon-run", "zeromon-rank"):
        asked[expression("Memory by role", board)] = [
            {"labels": f'{{place="device", role="{role}"}}', "value": value}
            for role, value in (("grad", 10), ("param", 20))
        ]
    answered(tmp_path, scraped, asked)


@needs_promtool
def test_stacked_phases_fill_one_step(tmp_path: Path) -> None:
    """Of two ranks that compute for 60 and 40 % of the time the stack reaches 100 %, not 200 %."""
    phases = {(0, "forward"): 9, (0, "other"): 6, (1, "forward"): 6, (1, "other"): 9}
    scraped = [
        series("zeromon_phase_seconds_total", f"0+{seconds}x40", rank=number, phase=phase)
        for (number, phase), seconds in phases.items()
    ]
    half = [{"labels": f'{{phase="{phase}"}}', "value": 0.5} for phase in ("forward", "other")]
    boards = ("zeromon-run", "zeromon-rank")
    answered(tmp_path, scraped, {expression("Phases", board): half for board in boards})


def test_an_axis_of_shares_is_not_made_for_zeros() -> None:
    """Of a line at 0, Grafana draws an axis from 0 to 10,000 % where nothing bounds it."""
    shares = [
        panel["fieldConfig"]["defaults"]
        for _, panel in PANELS
        if panel["type"] == "timeseries" and panel["fieldConfig"]["defaults"]["unit"] == "percentunit"
    ]
    assert shares
    for defaults in shares:
        assert defaults["min"] == 0
        assert defaults.get("max") == 1 or 0 < defaults["custom"]["axisSoftMax"] < 1
    charts = [p["fieldConfig"]["defaults"] for _, p in PANELS if p["type"] == "timeseries"]
    assert all("max" in one or "axisSoftMax" in one["custom"] for one in charts if "min" in one)
    bars = [p["fieldConfig"]["defaults"] for _, p in PANELS if p["type"] == "bargauge"]
    assert [(one["min"], one.get("max")) for one in bars] == [(0, 1), (0, None)]


# ---- the buckets of the step time, the links of alerts ----------------------------------------------


@pytest.mark.parametrize("seconds", [0.2 * 1.05**n for n in range(106)] + [0.3, 30.0])
def test_a_quantile_of_steps_is_near(seconds: float) -> None:
    """histogram_quantile interpolates within a bucket: 99 % of steps of one length are off by 30 %."""
    place = bisect.bisect_left(STEP_BUCKETS, seconds)
    low, high = STEP_BUCKETS[place - 1], STEP_BUCKETS[place]
    assert low + 0.99 * (high - low) <= 1.3 * seconds


def test_alerts_have_the_address_of_their_page(tmp_path: Path) -> None:
    """Where the pages are is the user's to say; without it, the command that prints the page."""
    path = tmp_path / "rules.yml"
    url = "https://wiki.example/zeromon/{code}.html"
    assert main(["prometheus", "rules", "--runbook-url", url, "-o", str(path)]) == 0
    alerts = yaml.safe_load(path.read_text())["groups"][-1]["rules"]
    for alert in alerts:
        notes = alert["annotations"]
        code = notes["runbook"].removeprefix("zeromon rule ")
        assert notes["runbook_url"] == f"https://wiki.example/zeromon/{code}.html"
