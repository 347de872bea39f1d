"""The truth bench's data: every case is complete, every monitor's file declares what it must."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from zeromon_vgpu.machine import Fault

BENCH = ROOT / "tests" / "bench" / "truth"
sys.path.insert(0, str(BENCH))

from monitor import Lines, Monitor, load_monitor, monitor_files  # noqa: E402

CASES: dict[str, Any] = json.loads((BENCH / "cases.json").read_text())
ALL = [(kind, name) for kind in ("gloo", "virtual") for name in CASES[kind]]
BY_CONSTRUCTION = ("cause", "rank", "late in", "stuck in", "grow in", "died at")
"""Questions whose truth no timeline has."""
STRATEGIES = ("ddp", "ddp-unused", "fsdp1", "fsdp2", "zero2", "zero3", "trainer")


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_case_says_what_runs_what_is_asked_and_what_is_true(kind: str, name: str) -> None:
    case = CASES[kind][name]
    assert (BENCH / case["program"]).is_file()
    assert {"strategy", "seed", "steps", "settings", "questions", "true"} <= set(case)
    assert set(case["questions"]) <= set(CASES["questions"])
    missing = {one for one in case["questions"] if one in BY_CONSTRUCTION} - set(case["true"])
    assert not missing
    for fault in case.get("faults", ()):
        assert set(fault) <= {field.name for field in dataclasses.fields(Fault)}


def test_every_strategy_is_healthy_and_overlaps_poorly_in_a_case() -> None:
    for state, cause in (("healthy", "healthy"), ("poor", "communication")):
        cases = {name: CASES["virtual"][f"{state}-{name}"] for name in STRATEGIES}
        assert [case["strategy"] for case in cases.values()] == list(STRATEGIES)
        assert {case["true"]["cause"] for case in cases.values()} == {cause}


@pytest.mark.parametrize("name", monitor_files())
def test_a_monitor_declares_its_cases_and_its_lines(name: str) -> None:
    module = load_monitor(name)
    monitor: Monitor = module.MONITOR
    assert monitor.name and inspect.getdoc(module)
    assert set(monitor.answers) == {"gloo", "virtual"}
    for kind, patterns in monitor.answers.items():
        assert [one for one in patterns if not any(fnmatchcase(case, one) for case in CASES[kind])] == []
    assert monitor.reason or any(monitor.answers.values())
    own = getattr(module, "Lines", None)
    assert (own is not None and issubclass(own, Lines)) == bool(monitor.lines)


def test_no_two_monitors_have_one_name() -> None:
    names = [load_monitor(name).MONITOR.name for name in monitor_files()]
    assert len(set(names)) == len(names) and names[0] == "zeromon"


def test_a_monitor_needs_no_other_file() -> None:
    """The bench names no monitor but zeromon and those that it cannot measure in turns."""
    for path in Path(BENCH).glob("*.py"):
        names = [load_monitor(name).MONITOR.name for name in monitor_files() if name != "zeromon"]
        assert not [one for one in names if f'"{one}"' in path.read_text()], path.name
