"""`zeromon.load` and `zeromon.compare`: Python gets the figures of the report, the page and the verb."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import recordings
from builders import run as snapshot
from command_line import environment, zeromon_here
from plotly.io import json as plotly_json
from support import ROOT, Node

import zeromon
from zeromon.base.errors import CompareError, RunNotFound, ZeromonError
from zeromon.cli.notebook import Run
from zeromon.storage.run_store import Store, decode_snapshot

RUNS = "healthy-ddp", "exposed-fsdp2-on"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """The folder of a node with two recorded runs of two ranks."""
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-test-")))
    for name in RUNS:
        recordings.replay(node, name)
    yield node.folder
    node.close()


@pytest.fixture(autouse=True)
def _of_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZEROMON_DIR", "ZEROMON_STORE"):
        monkeypatch.setenv(name, environment(home)[name])


@pytest.mark.parametrize("name", RUNS)
def test_each_step_is_that_of_the_report(home: Path, name: str) -> None:
    report = decode_snapshot(zeromon_here(home, "report", name, "--json").stdout.encode())
    shown = {(step.step, one.rank): step for one in report.ranks for step in one.steps.recent}
    rows = zeromon.load(name).steps.to_dict("records")
    assert [(row["step"], row["rank"]) for row in rows] == sorted(shown)
    assert any(step.timed for step in shown.values()) and not all(s.timed for s in shown.values())
    for row in rows:
        step = shown[row["step"], row["rank"]]
        exposed = step.exposed_ns / 1e9 if step.timed else math.nan
        assert row["seconds"] == pytest.approx(step.seconds, abs=1e-6)
        assert row["exposed_seconds"] == pytest.approx(exposed, abs=1e-6, nan_ok=True)
        assert row["forward_seconds"] == pytest.approx(step.phase_ns[1] / 1e9, abs=1e-6)
        assert row["rss_bytes"] == step.rss_bytes
        for column in ("reserved_bytes", "tokens"):  # no device, no batches
            assert math.isnan(row[column]) and getattr(step, column) == -1
        assert row["steps"] == 1


def test_sentences_and_findings_are_those_of_the_report(home: Path) -> None:
    run = zeromon.load("exposed-fsdp2-on")
    text = zeromon_here(home, "report", run.snapshot.run).stdout
    shown = json.loads(zeromon_here(home, "report", run.snapshot.run, "--json").stdout)
    cause, _, outcome = run.verdict.rpartition("; ")
    assert cause in " ".join(text.split()) and f"{run.snapshot.run}: {outcome}" in text
    assert [finding.code for finding in run.findings] == [f["code"] for f in shown["findings"]] != []
    assert " ".join(repr(run).split()).startswith(
        f"exposed-fsdp2-on: {run.verdict} {run.findings[0].code} "
    )
    assert max(map(len, repr(run).split("\n"))) <= 100


def test_pictures_are_those_of_the_page(home: Path, tmp_path: Path) -> None:
    run, page = zeromon.load("healthy-ddp"), tmp_path / "page.html"
    zeromon_here(home, "report", "healthy-ddp", "-o", str(page))
    markup = page.read_text()
    assert all(clause in markup for clause in run.verdict.split("; "))
    figures, _ = json.JSONDecoder().raw_decode(markup.partition("const figures = ")[2])
    drawn = [figure["data"] for figure in figures.values()]
    for picture in (run.memory(), run.exposed(), run.chart("step-time"), run.roles()):
        data = plotly_json.to_json_plotly(picture.to_plotly_json()["data"])
        assert len(data) > 200 and json.loads(data) in drawn


def test_the_line_of_a_picture_is_the_column_of_the_frame() -> None:
    run = zeromon.load("healthy-ddp")
    rows = run.steps[run.steps["rank"] == 0]
    line = run.exposed().data[0]
    assert list(line.x) == rows["step"].to_list()
    shares = [None if math.isnan(s) else s for s in 100 * rows["exposed_seconds"] / rows["seconds"]]
    assert list(line.y) == [share if share is None else pytest.approx(share) for share in shares]


def test_predicted_changes_are_those_of_plan(home: Path) -> None:
    asked = "plan", "--from", "exposed-fsdp2-on", "--sweep", "stage=0,2", "--json"
    points = json.loads(zeromon_here(home, *asked).stdout)["points"]
    picture = zeromon.load("exposed-fsdp2-on").changes("stage=0,2")
    shown = next(trace for trace in picture.data if trace.name == "predicted")
    expected = [1e3 * point["step_seconds"] / point["samples"] for point in points]
    assert len(expected) == 3
    assert list(shown.y) == pytest.approx(expected)


def test_compared_figures_are_those_of_the_verb(home: Path) -> None:
    done = zeromon_here(home, "compare", *RUNS, "--json")
    shown, compared = json.loads(done.stdout)["comparison"], zeromon.compare(*RUNS)
    frame = compared.to_pandas()
    for row in shown["rows"]:
        mine = frame[frame["metric"] == row["name"]]
        assert mine["runs"].to_list() == list(RUNS)
        for field in ("value", "difference", "noise"):
            expected = [math.nan if cell[field] is None else cell[field] for cell in row["cells"]]
            assert mine[field].astype(float).to_list() == pytest.approx(expected, nan_ok=True)
        assert mine["marked"].to_list() == [cell["marked"] for cell in row["cells"]]
    assert " ".join(shown["advice"]["text"].split()[1:]) in " ".join(repr(compared).split())


def test_a_comparison_is_a_coloured_table_in_a_notebook() -> None:
    compared = zeromon.compare(*RUNS)
    parts: list[str] = []
    compared._repr_pretty_(SimpleNamespace(text=parts.append), False)
    (shown,) = parts
    plain = re.sub("\x1b\\[[0-9]*m", "", shown)
    assert "step time, median" in plain and "\x1b[31m+" in shown
    assert repr(compared) == plain and max(map(len, plain.split("\n"))) <= 100


def test_a_run_is_found_by_its_beginning_a_file_and_a_folder(home: Path, tmp_path: Path) -> None:
    whole = zeromon.load("healthy-ddp")
    (tmp_path / "run.json").write_text(zeromon_here(home, "report", "healthy-ddp", "--json").stdout)
    shutil.copytree(Store().folder("healthy-ddp"), tmp_path / "taken")
    assert zeromon.load("healthy").snapshot.run == "healthy-ddp"
    assert zeromon.load().snapshot.run == "exposed-fsdp2-on"
    copied = zeromon.load(str(tmp_path / "taken"))
    pandas.testing.assert_frame_equal(copied.steps, whole.steps)
    assert copied.verdict == whole.verdict and copied.snapshot.run == "taken"
    of_file = zeromon.load(str(tmp_path / "run.json"))
    pandas.testing.assert_frame_equal(of_file.steps, whole.steps, check_exact=False)
    compared = zeromon.compare("healthy-ddp", str(tmp_path / "taken")).comparison
    assert not any(cell.difference for row in compared.rows for cell in row.cells)


def test_what_is_not_measured_is_said_by_the_picture(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.save(snapshot(run="young"))
    young: Run = zeromon.load(str(store.folder("young")))
    assert young.exposed().layout.title.text == "Exposed communication: no completed step"
    assert young.roles().layout.title.text == "Memory by role: no census has been taken yet"
    assert young.steps.empty and "exposed_seconds" in young.steps


def test_errors_say_what_to_do() -> None:
    with pytest.raises(RunNotFound, match="no run named absent") as error:
        zeromon.load("absent")
    assert "healthy-ddp" in error.value.hint
    if sys.version_info >= (3, 11):
        assert error.value.__notes__ == [error.value.hint]
    with pytest.raises(CompareError, match="two runs"):
        zeromon.compare("healthy-ddp")
    with pytest.raises(ZeromonError, match="no chart speed: there are step-time, memory, exposed"):
        zeromon.load("healthy-ddp").chart("speed")


@pytest.mark.parametrize(
    ("package", "use", "way_out"),
    [
        ("pandas", "run.steps", "a DataFrame needs pandas: pip install pandas"),
        (
            "plotly",
            "run.memory()",
            "a figure of zeromon[dashboard] needs a package that is not installed",
        ),
    ],
)
def test_without_a_package_the_way_out_is_said(home: Path, package: str, use: str, way_out: str) -> None:
    """The rest works without it."""
    code = f"""
import sys
sys.modules["{package}"] = None
import zeromon
run = zeromon.load("healthy-ddp")
print(run.verdict, len(repr(zeromon.compare("healthy-ddp", "exposed-fsdp2-on"))))
{use}
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, check=False)
    assert done.stdout.strip() and way_out in done.stderr


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(
        "```python\n(.*?)```", (ROOT / "docs" / "how-to" / "data.md").read_text(), re.DOTALL
    )
    for recorded, name in zip(RUNS, ("ddp", "fsdp2"), strict=True):
        shutil.copytree(Store().folder(recorded), tmp_path / "runs" / name)
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path))
    names: dict[str, Any] = {}
    exec(example, names)
    assert (
        len(names["slow"]) == 3 and names["slow"]["seconds"].max() == names["run"].steps["seconds"].max()
    )
    assert "host.optimizer_state" in names["significant"]["metric"].to_list()
