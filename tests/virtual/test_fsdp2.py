"""The agent on FSDP2's own schedule: exposed time by operation, unit and phase is that of the schedule.

FSDP2 runs unchanged on virtual streams, and the agent's hooks run unchanged beside it. The schedule
knows what each stream did when; the agent knows what its events say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from support import PROGRAMS, clean_environment

ALWAYS = (
    "default", "no prefetch", "stays gathered after forward", "HSDP",
    "2 micro-steps, one reduction",
)  # fmt: skip
SELDOM = (
    "two units ahead", "root reshards, too", "mixed precision", "HSDP, mixed precision",
    "HSDP, no prefetch", "2 micro-steps", "2 micro-steps, gathered once",
    "HSDP, 2 micro-steps, one reduction", "activation checkpointing",
)  # fmt: skip


@cache
def taken(cases: tuple[str, ...]) -> dict[str, Any]:
    """What both say in each case, from a process in which the virtual device may stay registered."""
    command = [sys.executable, str(PROGRAMS / "virtual_truth.py"), *cases]
    environment = clean_environment() | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {one["case"]: one for one in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", ALWAYS)
def test_the_agent_says_what_the_schedule_says(case: str) -> None:
    """To the nanosecond in each row, and the hooks neither fail nor stay."""
    agrees(taken(ALWAYS)[case])


@pytest.mark.long
@pytest.mark.parametrize("case", SELDOM)
def test_the_agent_says_what_the_schedule_says_in_each_other_case(case: str) -> None:
    agrees(taken(SELDOM)[case])


def agrees(one: dict[str, Any]) -> None:
    assert one["errors"] == ""
    assert one["kept"] == []
    assert one["schedule"] == one["agent"]
    assert sum(row[-1] for row in one["schedule"]) > 0, "nothing was exposed, so nothing was shown"


def exposed(case: str, *, op: str = "", phase: str = "") -> int:
    """Exposed nanoseconds of a case, by the schedule."""
    rows = taken(ALWAYS)[case]["schedule"]
    return sum(row[3] for row in rows if op in ("", row[0]) and phase in ("", row[2]))


def test_the_cases_differ_as_fsdp2_documents_it() -> None:
    """A truth that does not move would prove nothing."""
    assert exposed("no prefetch") > exposed("default")
    assert exposed("stays gathered after forward", op="all_gather", phase="backward") == 0
    assert exposed("default", op="all_gather", phase="backward") > 0
    assert exposed("HSDP", op="all_reduce") > 0
    assert exposed("default", op="all_reduce") == 0
    assert exposed("2 micro-steps, one reduction") < 2 * exposed("default")
