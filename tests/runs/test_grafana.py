"""Each panel of each dashboard asks a real Prometheus that scrapes a real run, while it trains."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grafana_boards.boards import BOARDS
from grafana_drawing import panels_of
from prometheus_server import Prometheus, needs_prometheus, scrape
from support import LAUNCH, ROOT, Node, start

from zeromon.cli import main
from zeromon.export.prometheus.metrics import METRICS

pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")

EXAMPLES = ROOT / "examples"
TRAIN = [
    *LAUNCH, "2", str(EXAMPLES / "train_gpt_deepspeed.py"),
    "--config", str(EXAMPLES / "deepspeed" / "zero3-offload.json"), "--no-compile", "--steps", "100000",
    *"--width 32 --layers 3 --heads 2 --length 32 --batch 2".split(),
]  # fmt: skip

NOT_HERE = {
    "needs a device": {
        "Device memory", "Fragmentation", "Allocation retries", "Utilization", "Power", "Temperature",
        "PCIe", "NVLink", "Throttling and errors", "Links", "MFU", "MFU now",
    },
    "needs a run that goes wrong": {"Ranks of a hang", "Steps until out of memory"},
    "needs the rule file": {"Alerts"},
    "needs fp16": {"Loss scale"},
    "needs a script that logs its loss": {"Loss"},
}  # fmt: skip
"""Panels that ranks on the host which train in bf16 without a fault cannot fill, and why."""


@dataclass
class Scraped:
    """A Prometheus that has seen a run, which was alive at *when*."""

    server: Prometheus
    when: float

    def answers(self, expression: str) -> list[dict[str, Any]]:
        for variable, value in (
            ("$__rate_interval", "6s"),
            ("$run", "train"),
            ("$rank", "0|1"),
            ("$node", ".*"),
        ):
            expression = expression.replace(variable, value)
        assert "$" not in expression
        return self.server.query(expression, at=self.when)


@pytest.fixture(scope="module")
def scraped() -> Iterator[Scraped]:
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-test-")))
    targets = [{"targets": [node.address]}]
    with Prometheus([scrape(static_configs=targets)]) as server, tempfile.TemporaryFile("w+") as output:
        running = start(
            TRAIN,
            node.environment("train", DS_ACCELERATOR="cpu"),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 120
        enough = "count(count_over_time(zeromon_communication_step_wait_seconds[1h]) >= 8)"
        while server.number(enough) < 2:
            node.collector.tick()
            if running.poll() is not None or time.monotonic() > deadline:
                output.seek(0)
                raise AssertionError(output.read())
            time.sleep(0.25)
        when = time.time()
        running.terminate()
        running.wait()
        yield Scraped(server, when)
    node.close()


PANELS = {
    f"{board.uid} {panel.title}": panel for board in BOARDS for row in board.rows for panel in row.panels
}


@needs_prometheus
def test_panels_have_answers_but_for_those_that_cannot(scraped: Scraped) -> None:
    """Every query of every other panel finds at least one series with a number."""
    empty = {
        (panel.title, query.legend)
        for panel in PANELS.values()
        for query in panel.queries
        if not any(one["value"][1] != "NaN" for one in scraped.answers(query.expr))
    }
    excused = set().union(*NOT_HERE.values())
    assert {title for title, _ in empty} == excused, empty


@needs_prometheus
def test_variables_have_choices(scraped: Scraped) -> None:
    """What the variables ask for: runs, the node, the ranks."""
    for label, expected in (("run", {"train"}), ("rank", {"0", "1"})):
        found = scraped.answers(f"count by ({label}) (zeromon_rank_info)")
        assert {one["metric"][label] for one in found} == expected
    (node,) = scraped.answers("count by (node) (zeromon_rank_info)")
    assert node["metric"]["node"]


@needs_prometheus
def test_figures_are_the_runs_own(scraped: Scraped) -> None:
    """A step's parts on the board are those of the run: phases fill the step, shares are shares."""
    (ranks,) = scraped.answers('sum(zeromon_rank_up{run=~"$run"})')
    assert float(ranks["value"][1]) == 2
    phases = next(p for t, p in PANELS.items() if t == "zeromon-run Phases")
    total = sum(float(one["value"][1]) for one in scraped.answers(phases.queries[0].expr))
    assert 0.5 < total < 1.5
    for title in ("Exposed communication", "Overlap"):
        for one in scraped.answers(PANELS[f"zeromon-run {title}"].queries[0].expr):
            assert 0 <= float(one["value"][1]) <= 1


# ---- the files ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("grafana") / "new"
    assert main(["prometheus", "dashboards", "-o", str(folder)]) == 0
    found = {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}
    assert set(found) == {board.uid for board in BOARDS}
    return found


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_file_is_a_dashboard(board: Any, files: dict[str, dict[str, Any]]) -> None:
    """What Grafana needs to import it: a recent schema, its own ids, and the variables."""
    made = files[board.uid]
    assert (made["uid"], made["title"], made["schemaVersion"]) == (board.uid, board.title, 41)
    ids = [panel["id"] for panel in made["panels"] if panel["type"] == "row"]
    ids += [panel["id"] for panel in panels_of(made)]
    assert len(set(ids)) == len(ids)
    assert all(isinstance(number, int) and number > 0 for number in ids)
    variables = made["templating"]["list"]
    assert [v["name"] for v in variables] == ["datasource", *board.variables]
    assert (variables[0]["type"], variables[0]["query"]) == ("datasource", "prometheus")
    for variable in variables[1:]:
        assert variable["type"] == "query"
        assert variable["query"].startswith("label_values(zeromon_rank_info")


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_say_what_they_show(board: Any, files: dict[str, dict[str, Any]]) -> None:
    """A title, help, a unit; each query its letter, its source, and a legend that tells series apart."""
    made = files[board.uid]
    used = {v["name"] for v in made["templating"]["list"]} | {"__rate_interval"}
    known = {spec.name for spec in METRICS}
    panels = panels_of(made)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        letters = [target["refId"] for target in panel["targets"]]
        assert all(letters)
        assert len(set(letters)) == len(letters)
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends)
        assert len(set(legends)) == len(legends)
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert names(target["expr"], "$") <= used
            metrics = names(target["expr"], "zeromon_")
            assert {base(name) for name in metrics} <= known


def names(expression: str, begin: str) -> set[str]:
    """Words in it that begin so; of variables without the dollar."""
    return {word.removeprefix("$") for word in re.findall(rf"{re.escape(begin)}\w+", expression)}


def base(name: str) -> str:
    """The metric of a histogram's series."""
    for part in ("_bucket", "_sum", "_count"):
        if name.endswith(part) and name.removesuffix(part) in {spec.name for spec in METRICS}:
            return name.removesuffix(part)
    return name


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_lie_side_by_side(board: Any, files: dict[str, dict[str, Any]]) -> None:
    """On all of 24 columns, none over another, without a gap, in the order of the rows."""
    places = [panel["gridPos"] for panel in files[board.uid]["panels"]]
    taken: set[tuple[int, int]] = set()
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        cells = set(itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        ))  # fmt: skip
        assert not cells & taken
        taken |= cells
    assert len(taken) == 24 * (max(y for _, y in taken) + 1)
    assert [(p["y"], p["x"]) for p in places] == sorted((p["y"], p["x"]) for p in places)
