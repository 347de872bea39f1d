"""docs/evidence: every figure has a date, a commit, a machine and its tool, and is on one page."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch_versions
from evidence_pages import (
    BLOCK,
    EVIDENCE,
    Entry,
    describe_setting,
    entry_faults,
    format_entries,
    measured_here,
    publish,
    published_steps_table,
    read_entries,
    strategies_table,
    timeline_table,
    whatif_table,
)
from gpu import calibration
from vgpu import table, truth_table

FILES = sorted((EVIDENCE / "data").glob("*.json"))
NAMES = [(file.stem, name) for file in FILES for name in json.loads(file.read_text())]
GOOD: Entry = {
    "tool": "tests/matrix.py", "date": "2026-11-28", "commit": "0123abc", "machine": "2 cores",
    "head": ["a", "b"], "rows": [["1", "2"]],
}  # fmt: skip


@pytest.mark.parametrize(("subject", "name"), NAMES)
def test_an_entry_has_a_date_a_commit_a_machine_and_a_tool(subject: str, name: str) -> None:
    assert entry_faults(read_entries(subject)[name]) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("date", ""), ("date", "November 2026"), ("commit", ""), ("commit", "0123abc-dirty"),
     ("machine", ""), ("tool", ""), ("tool", "tests/nothing.py"), ("rows", []), ("rows", [["1"]]),
     ("shown", ["c"]), ("shown_rows", ["2"])],
)  # fmt: skip
def test_a_wrong_entry_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    assert entry_faults({**GOOD, field: value})
    with pytest.raises(SystemExit, match="not published"):
        publish("any", {"one": {**GOOD, field: value}}, tmp_path)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("field", GOOD)
def test_an_entry_without_a_field_is_refused(field: str) -> None:
    assert entry_faults(GOOD) == []
    assert entry_faults({name: value for name, value in GOOD.items() if name != field})


def test_every_entry_is_in_one_block_or_says_why_not() -> None:
    blocks = [
        (subject, pattern)
        for page in EVIDENCE.glob("*.md")
        for _, subject, pattern, _ in BLOCK.findall(page.read_text())
    ]
    for subject, name in NAMES:
        places = [b for b in blocks if b[0] == subject and fnmatchcase(name, b[1])]
        is_omitted = bool(read_entries(subject)[name].get("omitted"))
        assert len(places) == (0 if is_omitted else 1), (subject, name, places)
    assert len(blocks) == len(set(blocks))


def test_files_are_as_a_tool_writes_them() -> None:
    assert FILES
    for file in FILES:
        assert file.read_text() == format_entries(json.loads(file.read_text()))


def test_a_published_entry_replaces_one_row_and_its_page(tmp_path: Path) -> None:
    folder = tmp_path / "evidence"
    shutil.copytree(EVIDENCE, folder)
    before = read_entries("cost", folder)
    entry = {**before["census"], "date": "2030-01-02", "rows": [["plain", "7.7 ms", "5 ms", "1 us"]]}
    publish("cost", {"census": entry}, folder)
    after = read_entries("cost", folder)
    assert after.pop("census") == entry and before.pop("census") != entry and after == before
    page = (folder / "cost.md").read_text()
    assert "| plain | 7.7 ms | 5 ms | 1 us |" in page and "2030-01-02, " in page


def test_an_entry_of_today_has_commit_and_machine() -> None:
    entry = measured_here("tests/matrix.py", head=["a"], rows=[["1"]])
    assert "cores of" in entry["machine"]
    assert not [fault for fault in entry_faults(entry) if not fault.startswith("commit")]


def test_the_largest_deviation_of_a_strategy_is_shown() -> None:
    phases = ["forward", "backward", "optimizer", "other"]
    head = ["strategy", "step", *phases, "exposed", "goodput", "busbw", "off target"]
    rows: list[list[Any]] = [
        ["DDP", 0.1, -0.2, 0.0, 0.0, None, [28.1, 28.0, 28.0], None, -5.9, ""],
        ["DDP", -0.4, 0.1, 0.0, 0.3, None, [56.5, 62.9, 63.0], None, None, "exposed"],
        ["FSDP1", 0.0, 0.0, 0.0, 0.0, 0.0, [20.0, 16.2, 26.2], None, 0.04, ""],
    ]
    shown, lines = timeline_table([{**GOOD, "head": head, "rows": rows}])
    assert list(shown) == ["strategy", "within targets", "step", "phase", "exposed", "busbw"]
    assert [list(line) for line in lines] == [
        ["DDP", "1 of 2", "-0.4 %", "+0.3 optimizer", "6.4", "-5.9 %"],
        ["FSDP1", "1 of 1", "0.0 %", "0.0 forward", "0.0", "0.0 %"],
    ]


def only_commit(entry: Entry) -> bool:
    """Whether nothing is wrong but the commit: a tree with changes has none."""
    return all(fault.startswith("commit") for fault in entry_faults(entry))


def test_versions_of_torch_are_published_with_the_columns_of_the_page() -> None:
    live = {"ddp": "", "fsdp2": torch_versions.TORCH, "pp": torch_versions.TORCH, "tp": "reports [1]"}
    tested = torch_versions.Tested("2.6.0", 7, Counter({"no GPU": 2}), ["test_a::test_b"], live)
    (entry,) = torch_versions.entries_of([tested]).values()
    assert only_commit(entry)
    assert entry["head"] == read_entries("versions")["torch-2.6.0"]["head"]
    not_run = f"fsdp2, pp: {torch_versions.TORCH}; tp: reports [1]"
    assert entry["rows"] == [["2.6.0", "7", "2: no GPU", "test_a::test_b", "ddp", "1 of 4", not_run]]


def test_versions_of_python_are_published_with_the_columns_of_the_page() -> None:
    oldest, newest = matrix.Outcome("polars 1.33.0", 1142), matrix.Outcome("polars 2.1.0", 1141, "a::b")
    assert list(matrix.HEAD) == read_entries("reliability")["python-3.12"]["head"]
    cells = matrix.cells_of("3.12", oldest, newest)
    assert cells == ["3.12", "polars 1.33.0", "polars 2.1.0", "1,142 and 1,141", "a::b"]
    assert matrix.cells_of("3.12", oldest, oldest)[-2:] == ["1,142", "0"]


def test_runs_beside_a_device_are_published_with_the_columns_of_the_page() -> None:
    """Of each figure the rank that is furthest off; a run that failed is within no target."""
    shares = {name: [0.25, 0.25] for name in (*truth_table.TRAINED, "other")}
    common = {"exposed": [0.3, 0.3, 0.31], "overlap": [None, 0.2, 0.2], "goodput": [0.5, 0.5, 0.6]}
    right = {"step": [1.0, 1.0], **shares, **common, "busbw": {"all_reduce": [1.02, 1.0]}}
    late = {**right, "step": [1.03, 1.0], "forward": [0.29, 0.25], "exposed": [0.355, 0.3, 0.31]}
    cell = {"version": "2.13.0", "world": 2, "strategy": "DDP", "bound": "launch", "log": "0",
            "date": "2026-11-28", "commit": "0123abcd"}  # fmt: skip
    cells = [cell | {"ranks": [right, late]}, cell | {"bound": "device", "failed": "it did not start"}]
    (name, entry), *others = truth_table.entries_of(cells).items()
    assert entry_faults(entry) == [] and not others
    assert entry["head"] == read_entries("timeline")[name]["head"]
    assert entry["rows"][0] == [
        "DDP", "launch", "never", 3.0, 4.0, 0.0, 0.0, 0.0, [35.5, 30.0, 31.0], [None, 20.0, 20.0],
        [50.0, 50.0, 60.0], 2.0, "step, forward, exposed",
    ]  # fmt: skip
    assert entry["rows"][1][3:-1] == [None] * 9 and entry["rows"][1][-1].startswith("failed: ")
    _, lines = timeline_table([entry])
    assert list(lines[0]) == ["DDP", "0 of 2", "+3.0 %", "+4.0 forward", "4.5", "0.0", "+2.0 %"]


def test_strategies_are_published_with_the_columns_of_the_page() -> None:
    """Versions of torch with the same results share a column."""
    results = [
        ("DDP", "2", "right"),
        ("DDP", "4", "right"),
        ("HSDP", "2", "n/a (needs 4 ranks)"),
        ("HSDP", "4", "right"),
    ]
    rows = [
        [name, version, ranks, result]
        for version in ("2.11.0", "2.13.0")
        for name, ranks, result in results
    ]
    rows += [["DDP", "2.15.0", "2", "losses off by 3.0%"]]
    entries = table.entries_of(rows)
    assert [*entries] == ["strategies-2.11.0", "strategies-2.13.0", "strategies-2.15.0"]
    assert all(map(only_commit, entries.values()))
    stored = read_entries("virtual-device")["strategies-2.13.0"]
    assert entries["strategies-2.13.0"]["head"] == stored["head"]
    head, lines = strategies_table([*entries.values()])
    assert list(head) == ["strategy", "ranks, torch 2.11, 2.13", "ranks, torch 2.15"]
    assert lines == [
        ["DDP", "right: 2, 4", "losses off by 3.0%: 2"],
        ["HSDP", "n/a (needs 4 ranks): 2; right: 4", "not run"],
    ]
    rows = [[name, "2.13.0", "2", "right"] for name in ("DDP", "FSDP2")]
    assert strategies_table([{**GOOD, "rows": rows}])[1] == [["DDP; FSDP2", "right: 2"]]


def test_a_calibration_is_published_with_the_columns_of_the_page() -> None:
    facts = {"torch": "2.11.0", "cores": 16, "date": "2026-11-27", "commit": ""}
    real = {
        **facts,
        "device": "NVIDIA H200",
        "properties": [["fill", 4.66012, "TB/s"], ["add", 4.2, "TB/s"]],
    }
    virtual = {**facts, "device": "a device", "cores": 2, "properties": [["fill", 2.818, "TB/s"]]}
    entry = calibration.entry_of(real, virtual, "0123abc")
    assert entry_faults(entry) == []
    assert entry["head"] == read_entries("virtual-device")["calibration"]["head"]
    assert entry["rows"] == [
        ["fill", "TB/s", "4.66", "2.818"],
        ["add", "TB/s", "4.2", "n/a (not measured)"],
    ]
    assert entry["machine"].endswith("virtual H200, torch 2.11.0, 2 cores")


def test_published_steps_are_shown_per_source_and_device() -> None:
    """A figure at an end of the interval lies in it; a first row has no error by itself."""
    head = read_entries("accuracy")["published"]["head"]
    rows = [
        ["A", "m", "8 H100", "1 x 1", 1.0, 1.1, 1.0, 1.2, 10.0, None],
        ["A", "m", "16 H100", "1 x 1", 2.0, 1.0, 0.9, 1.1, -50.0, 4.0],
        ["B", "m", "8 A100", "1 x 1", 2.0, 2.0, 1.9, 2.1, 0.0, None],
    ]
    _, lines = published_steps_table([{**GOOD, "head": head, "rows": rows}])
    assert lines == [
        ["A", "H100", "-50 to +10 %", "30 %", "4 %", "1 of 2"],
        ["B", "A100", "+0 to +0 %", "0 %", "n/a (one row)", "1 of 1"],
        ["all", "", "-50 to +10 %", "10 %", "4 %", "2 of 3"],
    ]


def test_predicted_changes_are_shown_per_strategy() -> None:
    head = read_entries("accuracy")["whatif"]["head"]
    rows = [
        ["ddp", "link=2", "2 ms", "1 ms", "1 ms", "-5.8%", "+0.0%"],
        ["ddp, a late rank", "stage=3", "2 ms", "1 ms", "1 ms", "+2.0%", "-19.1%"],
    ]
    _, lines = whatif_table([{**GOOD, "head": head, "rows": rows}])
    assert lines[0] == ["ddp", "2", "3.9 %", "-5.8 %, `link=2`", "1 of 2"]
    assert [line[0] for line in lines] == ["ddp", "all"]


def test_the_findings_name_the_range_of_the_achieved_gains() -> None:
    entry = read_entries("accuracy")["advice"]
    ratios = []
    for row in entry["rows"]:
        cells = dict(zip(entry["head"], row, strict=True))
        if interval := re.fullmatch(r"(\S+) to (\S+) ms", cells["predicted gain"]):
            middle = (float(interval[1]) + float(interval[2])) / 2
            ratios.append(float(cells["achieved"].removesuffix(" ms")) / middle)
    page = (EVIDENCE.parent / "explanation" / "findings.md").read_text()
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times the middle" in page


@pytest.mark.parametrize(
    ("options", "setting"),
    [("--stage 3 --offload-optimizer host --devices 8 --gpu a100 --micro-batch 2 --length 4096",
      "ZeRO-3, optimizer on the host, 8 a100, 2 x 4096"),
     ("--framework fsdp1 --devices 4 --gpu a10 --micro-batch 1 --length 512 --checkpointing",
      "FSDP1, 4 a10, 1 x 512, checkpointing")],
)  # fmt: skip
def test_options_of_plan_are_shown_in_short(options: str, setting: str) -> None:
    assert describe_setting(options) == setting
