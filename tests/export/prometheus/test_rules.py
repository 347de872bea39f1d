"""Rules and scrape configurations, as promtool judges them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_server import needs_promtool, promtool, series
from support import ROOT

from zeromon.cli import main
from zeromon.diagnosis.rule import find_page
from zeromon.export.prometheus import rules
from zeromon.export.prometheus.metrics import METRICS
from zeromon.ring.tokens import user_token_file

EVIL = 'e"vil\\n{{ . }}'
"""As much of a run's name as a user could set, and more."""


@pytest.fixture(scope="module")
def rule_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "rules.yml"
    assert main(["prometheus", "rules", "-o", str(path)]) == 0
    return path


@needs_promtool
def test_rules_are_rules(rule_file: Path) -> None:
    limits = rules.Thresholds()
    count = 2 * len(rules.AGGREGATES) + len(rules.all_alerts(limits))
    assert f"{count} rules found" in promtool("check", "rules", rule_file)


def test_rules_speak_of_metrics_that_are(rule_file: Path) -> None:
    """Each name in an expression is in the table, and each alert has a page."""
    known = {spec.name for spec in METRICS} | {
        f"{spec.name}_{part}"
        for spec in METRICS
        if spec.kind == "histogram"
        for part in ("sum", "count")
    }
    for group in yaml.safe_load(rule_file.read_text())["groups"]:
        for rule in group["rules"]:
            named = set(re.findall(r"\bzeromon_\w+", rule["expr"]))
            assert named, rule
            assert named <= known, rule
            if "alert" in rule:
                assert find_page(rule["annotations"]["runbook"].removeprefix("zeromon rule "))


def info(values: str = "1x200", **labels: Any) -> dict[str, str]:
    return series("zeromon_rank_info", values, node="n1", device="cpu", pid=7, **labels)


UP, UP_4 = series("zeromon_rank_up", "1x60"), series("zeromon_rank_up", "1x60", rank=4)
HANG = {"kind": "missing rank", "op": "all_gather", "group": "dp"}
CASES: dict[str, tuple[list[dict[str, str]], str, str, dict[str, str], tuple[str, ...]]] = {
    "ZeromonRankDied": (
        [info(), series("zeromon_rank_death", "_x10 1x4 _x80", cause="SIGKILL", role="culprit"),
         info(rank=4),
         series("zeromon_rank_death", "_x10 1x80", rank=4, cause="SIGTERM", role="victim"),
         info(rank=5),
         series("zeromon_rank_death", "_x10 1x80", rank=5, cause="SIGINT", role="stopped")],
        "12m", "40m",
        {"instance": "a:9417", "run": "r", "rank": "3", "node": "n1", "cause": "SIGKILL"},
        ("rank 3 of r on n1 died: SIGKILL",),
    ),
    "ZeromonHang": (
        [
            info(), info(rank=4), UP,
            series("zeromon_hang", "_x10 1x10 _x30", rank=3, role="waiting", **HANG),
            series("zeromon_hang", "_x10 1x10 _x30", rank=4, role="missing", **HANG),
        ], "15m", "30m",
        {"run": "r", **HANG},
        ("all_gather in dp of r hangs", "2 ranks", "rank 4 on n1"),
    ),
    "ZeromonStalled": (
        [info(), UP,
         series("zeromon_finding", "_x10 1x10 _x30", rule="stalled", severity="critical")],
        "15m", "30m", {"run": "r"}, ("r makes no progress",),
    ),
    "ZeromonOutOfMemory": (
        [info(), UP,
         series("zeromon_oom_risk_ratio", "0.1x10 0.9x10 0.2x40", pool="device")], "15m", "30m",
        {"instance": "a:9417", "run": "r", "rank": "3", "node": "n1", "pool": "device"},
        ("rank 3 of r on n1 is about to run out of device memory", "90%"),
    ),
    "ZeromonOutOfMemoryForecast": (
        [info(), UP,
         series("zeromon_oom_risk_ratio", "0.1x10 0.6x10 0.2x40", pool="host")], "15m", "30m",
        {"instance": "a:9417", "run": "r", "rank": "3", "node": "n1", "pool": "host"},
        ("rank 3 of r on n1 may run out of host memory",),
    ),
    "ZeromonSilentCollector": (
        [info("1x10 stale"), series("zeromon_rank_up", "1x10 stale"),
         info("1x10 stale", rank=4), series("zeromon_rank_up", "1x10 stale", rank=4),
         info("1x60", rank=5, instance="b:9417"),
         series("zeromon_rank_up", "1x60", rank=5, instance="b:9417")], "14m", "40m",
        {"instance": "a:9417", "run": "r", "node": "n1"},
        ("no collector answers for r on n1", "2 ranks"),
    ),
    "ZeromonStuckCollector": (
        [series("zeromon_collector_ticks_total", "0+60x10 600x10 660+60x40", run=None, rank=None)],
        "15m", "40m", {"instance": "a:9417"}, ("the collector at a:9417 reads no records",),
    ),
    "ZeromonStraggler": (
        [info(), UP, UP_4,
         series("zeromon_finding", "_x10 1x10 _x40", rule="straggler", severity="warning"),
         info(rank=4), series("zeromon_finding", "1x60", rank=4, rule="straggler", severity="info")],
        "15m", "30m", {"instance": "a:9417", "run": "r", "rank": "3", "node": "n1"},
        ("the other ranks wait for rank 3 of r on n1",),
    ),
    "ZeromonExposedCommunication": (
        [info(), info(rank=4), UP, UP_4,
         series("zeromon_exposed_communication_ratio", "0.1x60"),
         series("zeromon_exposed_communication_ratio", "0.1x10 0.4x10 0.1x40", rank=4)], "15m", "30m",
        {"run": "r"}, ("r waits for communication", "40%", "rank 4 on n1"),
    ),
    "ZeromonAgentErrors": (
        [info(), series("zeromon_agent_errors_total", "0x10 2x60")], "13m", "50m",
        {"instance": "a:9417", "run": "r", "rank": "3", "node": "n1"},
        ("hook calls fail on rank 3 of r on n1",),
    ),
    "ZeromonRecordsLost": (
        [info(), series("zeromon_events_dropped_total", "0x10 500x60")], "13m", "50m",
        {"instance": "a:9417", "run": "r", "rank": "3", "node": "n1"},
        ("records of rank 3 of r on n1 were lost",),
    ),
}  # fmt: skip
"""Alert -> what is scraped, when it fires, when it has resolved, its labels, what its words hold."""


def test_every_alert_has_a_case() -> None:
    assert {alert.name for alert in rules.all_alerts(rules.Thresholds())} == set(CASES)


def judged(
    folder: Path, rule_file: Path, scraped: list[dict[str, str]], name: str, *, at: str, expected: Any
) -> subprocess.CompletedProcess[str]:
    """What promtool says of whether exactly *expected* alerts fire *at* these times."""
    test = {
        "rule_files": [str(rule_file)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": scraped,
                "alert_rule_test": [
                    {"eval_time": time, "alertname": name, "exp_alerts": expected} for time in at.split()
                ],
            }
        ],
    }
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump(test))
    return subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)


@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_says_who_and_resolves(name: str, rule_file: Path, tmp_path: Path) -> None:
    """promtool itself runs the rules over what would be scraped."""
    scraped, firing, resolved, labels, words = CASES[name]
    alert = next(a for a in rules.all_alerts(rules.Thresholds()) if a.name == name)
    told = judged(tmp_path, rule_file, scraped, name, at=f"5m {resolved}", expected=[])
    assert told.returncode == 0, told.stdout + told.stderr
    # asked for nothing, promtool prints what fires; asked for that, it agrees
    told = judged(tmp_path, rule_file, scraped, name, at=firing, expected=[])
    assert told.returncode != 0, "nothing fires"
    for word in words:
        assert word in told.stderr, told.stderr
    for label, value in (labels | {"severity": alert.severity}).items():
        assert f'{label}="{value}"' in told.stderr, told.stderr
    assert told.stderr.count("alertname=") == 1, told.stderr
    assert "<error" not in told.stderr


PRESENT = (
    "ZeromonHang", "ZeromonStalled", "ZeromonOutOfMemory", "ZeromonOutOfMemoryForecast",
    "ZeromonStraggler", "ZeromonExposedCommunication",
)  # fmt: skip
"""Alerts about ranks that train."""


@needs_promtool
@pytest.mark.parametrize("name", PRESENT)
def test_no_alert_fires_for_ranks_that_have_ended(name: str, rule_file: Path, tmp_path: Path) -> None:
    """The same series, of ranks whose processes are gone."""
    scraped, firing, *_ = CASES[name]
    ended = [
        one | {"values": "0x60"} if one["series"].startswith("zeromon_rank_up") else one
        for one in scraped
    ]
    told = judged(tmp_path, rule_file, ended, name, at=firing, expected=[])
    assert told.returncode == 0, told.stdout + told.stderr


@needs_promtool
def test_a_death_is_news_for_a_quarter_of_an_hour(rule_file: Path, tmp_path: Path) -> None:
    """Its series stays as long as another run keeps the collector alive."""
    died = series("zeromon_rank_death", "_x10 1x90", cause="exception", role="culprit")
    told = judged(tmp_path, rule_file, [info(), died], "ZeromonRankDied", at="20m", expected=[])
    assert "died: exception" in told.stderr
    told = judged(tmp_path, rule_file, [info(), died], "ZeromonRankDied", at="27m", expected=[])
    assert told.returncode == 0, told.stderr


@needs_promtool
def test_a_hostile_name_stays_a_name(rule_file: Path, tmp_path: Path) -> None:
    """Templates query by the run's name: quotes, backslashes and braces in it are text."""
    scraped, firing, *_ = CASES["ZeromonHang"]
    evil = [
        one | {"series": one["series"].replace('run="r"', f"run={json.dumps(EVIL)}")} for one in scraped
    ]
    told = judged(tmp_path, rule_file, evil, "ZeromonHang", at=firing, expected=[])
    assert f"run={json.dumps(EVIL)}" in told.stderr
    assert "rank 4 on n1" in told.stderr
    assert "error" not in told.stderr


@needs_promtool
def test_two_jobs_of_one_name_are_two(rule_file: Path, tmp_path: Path) -> None:
    """Joins that met two nodes for one rank would fail, and the alert with them."""
    scraped, firing, *_ = CASES["ZeromonOutOfMemory"]
    other = [
        one | {"series": one["series"].replace("a:9417", "b:9417").replace("n1", "n2")}
        for one in scraped
    ]
    told = judged(tmp_path, rule_file, scraped + other, "ZeromonOutOfMemory", at=firing, expected=[])
    assert told.stderr.count("alertname=") == 2, told.stderr
    assert "on n1" in told.stderr
    assert "on n2" in told.stderr


def recorded(
    folder: Path, rule_file: Path, scraped: list[dict[str, str]], asked: dict[str, float]
) -> str:
    """What promtool has against *asked*: expressions with their values after ten minutes."""
    test = {
        "rule_files": [str(rule_file)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": scraped,
                "promql_expr_test": [
                    {
                        "expr": expression,
                        "eval_time": "10m",
                        "exp_samples": [{"labels": "{}", "value": value}],
                    }
                    for expression, value in asked.items()
                ],
            }
        ],
    }
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump(test))
    told = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    return told.stdout.replace("SUCCESS", "").replace("Unit Testing:", "").replace(
        str(path), ""
    ).strip() + (told.stderr.strip())


@needs_promtool
def test_records_add_up_ranks_of_runs_and_nodes(rule_file: Path, tmp_path: Path) -> None:
    """Four ranks on two nodes; the figures are worked out by hand."""
    scraped = []
    for rank, (node, exposed, step) in enumerate(
        (("n1", 0.1, 1), ("n1", 0.3, 1), ("n2", 0.2, 2), ("n2", 0.6, 2))
    ):
        where = {"rank": rank, "instance": f"{node}:9417"}
        scraped += [
            series("zeromon_rank_info", "1x40", node=node, **where),
            series("zeromon_rank_up", f"{int(rank != 3)}x40", **where),
            series("zeromon_exposed_communication_ratio", f"{exposed}x40", **where),
            series("zeromon_step_seconds_sum", f"0+{30 * step}x40", **where),
            series("zeromon_step_seconds_count", "0+30x40", **where),
        ]
    asked = {
        'sum(zeromon:run_ranks:count{run="r"})': 4.0,
        "sum(zeromon:run_ranks_up:sum)": 3.0,
        'sum(zeromon:node_ranks_up:sum{node="n2"})': 1.0,
        "sum(zeromon:run_exposed_communication_ratio:max)": 0.6,
        'sum(zeromon:node_exposed_communication_ratio:max{node="n1"})': 0.3,
        'round(sum(zeromon:node_exposed_communication_ratio:avg{node="n1"}), 1e-6)': 0.2,
        "sum(zeromon:run_step_seconds:avg)": 1.5,
        'sum(zeromon:node_step_seconds:max{node="n2"})': 2.0,
        "count(zeromon:node_ranks:count)": 2.0,
    }
    assert recorded(tmp_path, rule_file, scraped, asked) == ""
    wrong = recorded(tmp_path, rule_file, scraped, {"sum(zeromon:run_ranks:count)": 5.0})
    assert "FAILED" in wrong


@needs_promtool
def test_thresholds_are_those_that_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    assert main(["prometheus", "rules", "-o", str(path), "--exposed", "0.5", "--patience", "2h"]) == 0
    promtool("check", "rules", path)
    scraped, firing, *_ = CASES["ZeromonExposedCommunication"]
    told = judged(tmp_path, path, scraped, "ZeromonExposedCommunication", at=firing, expected=[])
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("wrong", (["--exposed", "25"], ["--silent", "soon"], ["--exposed", "-1"]))
def test_thresholds_that_make_no_sense_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["prometheus", "rules", *wrong])
    assert caught.value.code == 2


@needs_promtool
def test_configurations_are_configurations(tmp_path: Path, rule_file: Path) -> None:
    """For discovery, for targets, with a token: promtool reads them, and the token file with them."""
    token = tmp_path / "token"
    token.write_text("secret")
    path = tmp_path / "prometheus.yml"
    for words in (
        ["--sd", "http://n0:9417/sd"],
        ["--target", "127.0.0.1:9417", "--target", "n1:9417", "--interval", "5s"],
        ["--sd", "http://n0:9417/sd", "--token-file", str(token), "--rules", str(rule_file)],
    ):
        assert main(["prometheus", "config", *words, "-o", str(path)]) == 0
        assert "SUCCESS" in promtool("check", "config", path)
        jobs = yaml.safe_load(path.read_text())["scrape_configs"]
        if "--token-file" not in words:  # that of this user
            assert jobs[0]["authorization"] == {"credentials_file": str(user_token_file())}
    (job,) = yaml.safe_load(path.read_text())["scrape_configs"]
    assert job["authorization"] == {"credentials_file": str(token)}
    assert job["http_sd_configs"][0]["authorization"] == {"credentials_file": str(token)}
    assert job["honor_labels"] is True


def test_a_configuration_without_a_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prometheus", "config"]) == 2
    assert "--sd" in capsys.readouterr().err


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prometheus", "rules", "-o", str(tmp_path / "none" / "rules.yml")]) == 2
    assert "cannot write" in capsys.readouterr().err


BLOCKS = re.findall(
    r"```yaml\n(.*?)```", (ROOT / "docs" / "how-to" / "prometheus.md").read_text(), re.DOTALL
)


@needs_promtool
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_what_the_docs_configure_is_a_configuration(number: int, tmp_path: Path) -> None:
    """With the token where it is on this machine; Debian's promtool is built without Kubernetes."""
    token, path = tmp_path / "token", tmp_path / "prometheus.yml"
    token.write_text("secret")
    block = yaml.safe_load(BLOCKS[number].replace("/etc/prometheus/zeromon-token", str(token)))
    if (
        "receivers" in block
    ):  # an OpenTelemetry Collector has a Prometheus's configuration inside its own
        block = block["receivers"]["prometheus"]["config"]
    path.write_text(yaml.safe_dump(block))
    if "kubernetes_sd_configs" not in BLOCKS[number]:
        assert "SUCCESS" in promtool("check", "config", path)
    elif shutil.which("victoria-metrics"):
        data = f"-storageDataPath={tmp_path}/data"
        command = ["victoria-metrics", "-dryRun", f"-promscrape.config={path}", data]
        told = subprocess.run(command, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
    else:
        pytest.skip("victoria-metrics is not installed")


def test_the_docs_name_every_alert_and_its_page() -> None:
    text = (ROOT / "docs" / "how-to" / "prometheus.md").read_text()
    told = set(re.findall(r"^\| (Zeromon\w+) .*\| (\w+) \| (ZM\d+) \|$", text, re.MULTILINE))
    assert told == {(a.name, a.severity, a.code) for a in rules.all_alerts(rules.Thresholds())}
    count = 2 * len(rules.AGGREGATES)
    assert f"prints {count} recording rules" in text
    assert len(BLOCKS) == 4
