"""docs/evidence/data/attacks.json names tests that exist, and every attack has one."""

from __future__ import annotations

import re
from pathlib import Path

from evidence_pages import read_entries

ROOT = Path(__file__).resolve().parents[2]
ROWS = [row for entry in read_entries("attacks").values() for row in entry["rows"]]
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)(?:\[([^\]`]+)\])?`")


def test_all_48_attacks_of_the_first_table_are_there() -> None:
    numbers = {int(number) for row in ROWS for number in re.findall(r"\d+", row[0])}
    assert numbers == set(range(1, 49))


def test_every_attack_has_a_test_that_exists() -> None:
    missing = []
    for _, attack, _, tests in ROWS:
        named = TEST.findall(tests)
        assert len(named) == tests.count("::") > 0, attack
        for file, name, case in named:
            path = ROOT / "tests" / file
            text = path.read_text() if path.exists() else ""
            if f"def {name}(" not in text or (case and f'"{case}"' not in text):
                missing.append(f"{file}::{name}[{case}]")
    assert missing == []
