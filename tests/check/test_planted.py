"""Twenty trainings with one mistake each, and five without: what zeromon check says of each folder.

The scripts look like those of users: helper functions, constants, dicts that are merged, and launch
files whose comments name the machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from zeromon.check.problem import Problem
from zeromon.check.runner import check

PLANTED = ROOT / "tests" / "data" / "planted"
SECOND = ROOT / "tests" / "data" / "planted_second"
"""Twenty others, by another author who had not seen the checks either; the checks had not seen them."""


def cases(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


CASES = cases(PLANTED)
LEAST = 18
"""Mistakes that must be found, by rule and line."""

NOT_TRAINING = {"hostfile"}
REVIEWED = {("clean1", "ZM104")}
"""DeepSpeed has renamed a key of aio that clean1 has, and ignores the old name: the finding is true."""


def problems_of(folder: Path) -> tuple[Problem, ...]:
    files = [str(file) for file in sorted(folder.iterdir()) if file.name not in NOT_TRAINING]
    return check(files).problems


@pytest.mark.parametrize("batch", [PLANTED, SECOND], ids=lambda path: path.name)
def test_the_planted_mistakes_are_found(batch: Path) -> None:
    missed = []
    for case in cases(batch):
        found = {(p.code, f"{Path(p.file).name}:{p.line}") for p in problems_of(batch / case["case"])}
        if not found & {(case["rule"], place) for place in case["places"]}:
            missed.append((case["case"], case["mistake"], sorted(found)))
    assert len(cases(batch)) == 20
    assert len(missed) <= 20 - LEAST, missed


@pytest.mark.parametrize("name", [case["case"] for case in CASES])
def test_a_planted_file_has_no_other_error(name: str) -> None:
    """Each folder has one mistake: what is said beside it is information."""
    rule = next(case["rule"] for case in CASES if case["case"] == name)
    others = {p for p in problems_of(PLANTED / name) if p.severity != "info" and p.code != rule}
    assert others == set()


@pytest.mark.parametrize(
    "folder", sorted([*PLANTED.glob("clean*"), *SECOND.glob("clean*")]), ids=lambda path: path.name
)
def test_a_folder_without_a_mistake_has_none(folder: Path) -> None:
    found = {(folder.name, p.code) for p in problems_of(folder) if p.severity != "info"}
    assert found == found & REVIEWED
