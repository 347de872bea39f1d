"""Broken input of every kind ends in an error for users, or in nothing (docs/evidence/reliability.md).

``ZEROMON_FUZZ_CASES`` is the number of cases of all targets together: ``make test-long`` has a million.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fuzz.mutation import Mutations
from fuzz.targets import TARGETS, Target, run_case, run_cases

CASES = int(os.environ.get("ZEROMON_FUZZ_CASES", 3000))
FOUND = sorted((Path(__file__).parent / "found").glob("*/*"))


def test_the_shares_are_of_a_thousand() -> None:
    assert sum(target.share for target in TARGETS) == 1000


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_broken_input_crashes_nothing(target: Target, tmp_path: Path) -> None:
    failures, _ = run_cases(target, range(max(10, CASES * target.share // 1000)), tmp_path)
    assert failures == {}, f"python tests/fuzz/targets.py {target.name} NUMBER repeats it"


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_stays_mended(path: Path, tmp_path: Path) -> None:
    target = next(target for target in TARGETS if target.name == path.parent.name)
    run_case(target, path.read_bytes(), tmp_path)


def test_a_case_is_the_same_everywhere() -> None:
    first, second = Mutations("ring_names"), Mutations("ring_names")
    assert [first.case(n) for n in range(50)] == [second.case(n) for n in range(50)]
