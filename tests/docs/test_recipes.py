"""The recipes of CONTRIBUTING.md, carried out: their code blocks are executed, their results found.

A recipe is a section with Python blocks: functions, and then the line that goes into a list.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from builders import rank, run, summary
from served import Fixed, get
from support import PROGRAMS, Node
from textual.pilot import Pilot
from tui.snapshots import FixedSource, snapshot

from zeromon import cli
from zeromon.collector.http import start_http_server
from zeromon.diagnosis import engine, rule as rules
from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.rule import Rule
from zeromon.diagnosis.rules import all_rules, health
from zeromon.export import formats
from zeromon.export.prometheus import metrics
from zeromon.export.prometheus.metrics import Writer
from zeromon.readout import charts
from zeromon.readout.report import render_run
from zeromon.ring.strategy import Framework, Strategy
from zeromon.snapshot.communication import GroupProgress
from zeromon.storage.run_store import Store
from zeromon.storage.step_history.rows import NAMES, row_of
from zeromon.storage.step_history.writer import Writer as StepWriter, rows_frame
from zeromon.tui.app import ZeromonApp
from zeromon.tui.widgets.panel import Panel
from zeromon.tui.widgets.table import Table
from zeromon_dashboard import layout
from zeromon_dashboard.html_report import run_page
from zeromon_dashboard.layout import page_skeleton
from zeromon_dashboard.page import Known
from zeromon_dashboard.url_state import Route

ROOT = Path(__file__).resolve().parents[2]


def blocks(recipe: str, language: str = "python") -> list[str]:
    """The blocks of *language* in the section *recipe* of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition(f"### {recipe}\n")[2].partition("\n### ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def made(recipe: str, module: ModuleType) -> Any:
    """What the last block evaluates to, after the blocks before it, as if they stood in *module*."""
    *functions, line = blocks(recipe)
    names = dict(vars(module))
    for function in functions:
        exec(function, names)
    return eval(line.strip(), names)


async def until_drawn(app: ZeromonApp, pilot: Pilot[int]) -> None:
    """Waits for the first snapshot on the screen."""
    for _ in range(1000):
        await pilot.pause(0.02)
        if app.model is not None:
            break
    await pilot.pause(0.1)


def load(path: Path) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def new_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rule]:
    """The rule of the recipe in its family, and its page beside the others."""
    names = dict(vars(health))
    exec(blocks("A rule")[0], names)
    made_rule = next(value for name, value in names.items() if name not in vars(health))
    assert isinstance(made_rule, Rule)
    monkeypatch.setattr(health, made_rule.name, made_rule, raising=False)
    folder = tmp_path / "rules"
    shutil.copytree(Path(str(health.__file__)).parent, folder)
    (folder / f"{made_rule.code}.md").write_text(blocks("A rule", "markdown")[0])
    monkeypatch.setattr(rules, "files", lambda package: folder)
    rules.all_pages.cache_clear()
    monkeypatch.setattr(engine, "all_rules", all_rules.__wrapped__)
    yield made_rule
    rules.all_pages.cache_clear()


async def test_a_rule_is_in_every_view(
    new_rule: Rule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Report, terminal, dashboard, HTML report, /metrics, ``zeromon rule`` and the page of rules."""
    groups = tuple(
        GroupProgress(group_id=f"g{n}", label="g", ranks=(0, 1), sequence=1) for n in range(101)
    )
    one = run(rank(0, groups=groups))
    assert new_rule.name not in {finding.rule for finding in advise(run(rank(0)))}
    one = replace(one, findings=advise(one))
    text = "the rank is a member of 101 process groups"
    finding = next(finding for finding in one.findings if finding.rule == new_rule.name)
    assert (finding.code, finding.rank, finding.text) == (new_rule.code, 0, text)
    assert text in render_run(one)
    app = ZeromonApp(FixedSource(one), store=Store(tmp_path), now=lambda: 1070.4)
    async with app.run_test(size=(160, 50)) as pilot:
        await until_drawn(app, pilot)
        await pilot.press("6")
        await pilot.pause(0.1)
        table = app.screen.query_one("#findings", Table)
        assert [f.rule for f in table.rows if f.rule == new_rule.name]
    advice = layout.page_of(layout.Known(Route(run=one.run, page="advice"), one, {}))
    assert text in str(advice.parts)
    assert text in run_page(one, {name: [] for name in NAMES}, "")
    series = Writer().write([one], None, openmetrics=False).decode()
    assert f'rule="{new_rule.name}",severity="warning"}} 1' in series
    assert cli.main(["rule", new_rule.code]) == 0
    assert "NCCL allocates buffers" in capsys.readouterr().out
    rules_page = load(ROOT / "docs" / "generate.py").rules_page()
    assert f"[{new_rule.code}]" in rules_page and rules.find_page(new_rule.name).summary in rules_page


def test_the_page_of_the_recipe_has_the_sections_of_all_pages() -> None:
    def sections(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith("## ")]

    assert sections(blocks("A rule", "markdown")[0]) == sections(rules.find_page("ZM601").text)


def test_a_metric_is_on_every_way_to_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    """/metrics in both formats, and the page of metrics."""
    spec = made("A metric", metrics)
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, spec))
    one = run(rank(0), rank(1))
    server = start_http_server(Fixed(one), "127.0.0.1", 0)
    try:
        text = get(server.server_port, "/metrics")[1].decode()
        opened = get(server.server_port, "/metrics", Accept="application/openmetrics-text")[1].decode()
    finally:
        server.shutdown()
    count = len(one.ranks[0].communication.groups)
    series = f'zeromon_process_groups{{run="{one.run}",rank="0"}} {count}\n'
    assert series in text and series in opened
    table = load(ROOT / "docs" / "generate.py").metrics_table()
    assert f"| `zeromon_process_groups` | gauge | groups | - | {spec.help} |" in table


async def test_a_chart_is_in_terminal_page_and_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The terminal's overview and rank screen, the dashboard's overview, and the HTML report."""
    spec = made("A chart over the steps", charts)
    monkeypatch.setattr(charts, "CHARTS", (*charts.CHARTS, spec))
    app = ZeromonApp(FixedSource(snapshot(2)), store=Store(tmp_path), now=lambda: 1070.4)
    async with app.run_test(size=(160, 50)) as pilot:
        await until_drawn(app, pilot)
        panel = app.screen.query_one("#chart-collectives", Panel)
        assert "collectives" in str(panel.border_title)
        drawn = "".join(text for line in panel.lines() for text, _ in line)
        assert "step" in drawn and any("\u2800" < sign <= "\u28ff" for sign in drawn)
        await pilot.press("5", "enter")
        await pilot.pause(0.2)
        assert app.screen.query_one("#rank-collectives", Panel).border_title == "collectives"
    one = run(rank(0))
    series = rows_frame([row_of(0, summary(n), 0) for n in range(1, 4)]).to_dict(as_series=False)
    route = Route(run=one.run)
    page = layout.page_of(Known(route, one, series))
    assert page.charts["collectives"].traces["rank 0"] == ([1, 2, 3], [12.0] * 3)
    assert "collectives" in str(page_skeleton(route, page, None, [0]).to_plotly_json())
    assert "Collectives" in run_page(one, series, "")


def test_a_step_has_what_the_recipe_of_a_chart_reads() -> None:
    spec = made("A chart over the steps", charts)
    assert spec.read(summary(1)) == 12.0


def test_an_exporter_is_a_choice_of_export_and_writes_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help, the choices of --to, the default name, and a file with a row a step."""
    monkeypatch.setitem(formats.FORMATS, "jsonl", made("An exporter", formats))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.umask", lambda mask: mask)  # the verb sets it for good
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    store, one = Store(tmp_path / "store"), run(rank(0), run="train-9")
    StepWriter(store.history(one.run)).append([row_of(0, summary(n), 0) for n in range(1, 4)])
    store.save(one)
    sys.modules.pop("zeromon.cli.export", None)  # its help is made when it is imported
    try:
        with pytest.raises(SystemExit):
            cli.main(["export", "--help"])
        assert "--to jsonl         a JSON object a rank and step" in capsys.readouterr().out
        assert cli.main(["export", one.run, "--to", "jsonl"]) == 0
    finally:
        sys.modules.pop("zeromon.cli.export", None)
    lines = (tmp_path / "train-9.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_training_framework_is_in_the_snapshot(shared_node: Node, tmp_path: Path) -> None:
    """Its units, with their collectives; its model's metadata; its strategy; and no patch remains."""
    module, line = blocks("A training framework")
    (tmp_path / "recipe.py").write_text(module)
    command = [sys.executable, str(PROGRAMS / "new_backend.py"), str(tmp_path), line.strip()]
    result = shared_node.run(command, ZEROMON_SHIM="0")
    assert result.code == 0, result.output
    assert "errors 0 None, unpatched True" in result.output
    seen = result.snapshot.ranks[0]
    assert {row.fqn: row.unshards for row in seen.communication.units} == {"layers.0": 6, "layers.1": 6}
    gathers = {
        row.unit: row.count for row in seen.communication.traffic if row.unit.startswith("layers.")
    }
    assert gathers == {"layers.0": 6, "layers.1": 6}
    assert seen.config.models == ({"framework": "shardlib", "stage": 3, "numel": 40},)
    assert (seen.strategy, seen.strategy_fields) == ("fsdp2", Strategy(Framework.FSDP2, stage=3))
