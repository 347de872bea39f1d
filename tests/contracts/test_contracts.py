"""What users rely on changes only on purpose: ``contracts.txt`` is what ``dump.py`` prints."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
HINT = (
    "\nThe command line, metrics, JSON keys, rules or environment variables changed. If intended, run\n"
    "    python tests/contracts/dump.py > tests/contracts/contracts.txt\n"
    "and describe the change in CHANGELOG.md."
)


def dump() -> str:
    spec = importlib.util.spec_from_file_location("contracts_dump", HERE / "dump.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text: str = module.dump()
    return text


def test_what_users_rely_on_is_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZEROMON_PORT", "ZEROMON_HOST", "ZEROMON_PROMETHEUS", "ZEROMON_TOKEN"):
        monkeypatch.delenv(name, raising=False)  # defaults of options come from these
    stored = (HERE / "contracts.txt").read_text()
    difference = difflib.unified_diff(stored.splitlines(), dump().splitlines(), "stored", "now", n=0)
    assert list(difference) == [], HINT


def test_the_dump_covers_every_kind() -> None:
    kinds = {line.split(" ", 1)[0] for line in dump().splitlines()}
    assert kinds == {"cli", "metric", "json", "rule", "environment"}
