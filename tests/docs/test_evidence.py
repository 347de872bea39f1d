"""docs/evidence: every figure has a date, a commit, a machine and its tool, and is on one page."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from evidence_pages import (
    BLOCK,
    EVIDENCE,
    Entry,
    describe_setting,
    entry_faults,
    format_entries,
    measured_here,
    publish,
    read_entries,
    timeline_table,
)

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
     ("machine", ""), ("tool", ""), ("tool", "tests/nothing.py"), ("rows", []), ("rows", [["1"]]), ("shown", ["c"]),
     ("shown_rows", ["2"])],
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


@pytest.mark.parametrize(
    ("options", "setting"),
    [("--stage 3 --offload-optimizer host --devices 8 --gpu a100 --micro-batch 2 --length 4096",
      "ZeRO-3, optimizer on the host, 8 a100, 2 x 4096"),
     ("--framework fsdp1 --devices 4 --gpu a10 --micro-batch 1 --length 512 --checkpointing",
      "FSDP1, 4 a10, 1 x 512, checkpointing")],
)  # fmt: skip
def test_options_of_plan_are_shown_in_short(options: str, setting: str) -> None:
    assert describe_setting(options) == setting
