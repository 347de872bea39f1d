"""The pages that docs/generate.py writes are those of the present code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from evidence_pages import BLOCK, EVIDENCE, read_entries, render_page

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_metrics_is_the_generated_one(generate: ModuleType) -> None:
    """If this fails, run ``python docs/generate.py``."""
    text = (DOCS / "reference" / "metrics.md").read_text()
    assert text == generate.page_with_table(text, generate.metrics_table())
    assert text.count("| `zeromon_") == len(generate.METRICS) > 90


def test_the_table_of_devices_is_the_generated_one(generate: ModuleType) -> None:
    """If this fails, run ``python docs/generate.py``, after a new device has its source there."""
    text = (DOCS / "reference" / "devices.md").read_text()
    assert text == generate.page_with_table(text, generate.devices_table())
    assert set(generate.SOURCES) == set(generate.DEVICES)


def test_the_page_of_rules_is_the_generated_one(generate: ModuleType) -> None:
    """If this fails, run ``python docs/generate.py``."""
    text = (DOCS / "reference" / "rules.md").read_text()
    assert text == generate.rules_page()
    assert text.count("| [ZM") == len(generate.all_pages()) > 60


def test_the_page_of_the_command_line_is_the_generated_one(generate: ModuleType) -> None:
    """If this fails, run ``python docs/generate.py``, after a new variable has its row there."""
    text = (DOCS / "reference" / "cli.md").read_text()
    assert text == generate.cli_page()
    assert all(f"\n## zeromon {verb}\n" in text for verb in generate.VERBS)
    assert text.count("\n| `") > 200


@pytest.mark.parametrize("page", sorted(page.name for page in EVIDENCE.glob("*.md")))
def test_the_tables_of_evidence_are_the_generated_ones(page: str) -> None:
    """If this fails, run ``python docs/generate.py``."""
    text = (EVIDENCE / page).read_text()
    assert text == render_page(text)
    assert BLOCK.search(text)


def test_every_variable_that_the_code_reads_is_listed(generate: ModuleType) -> None:
    """The pattern finds variables of zeromon, of launchers and of a virtual device."""
    assert {"ZEROMON_STORE", "WORLD_SIZE", "VGPU_RANKS", "SLURM_NTASKS"} <= generate.variables_read()


def test_the_published_steps_are_predicted_anew() -> None:
    """If this fails, run ``python tests/bench/bench_published.py --publish``."""
    path = DOCS.parent / "tests" / "bench" / "bench_published.py"
    spec = importlib.util.spec_from_file_location("bench_published", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes look up their annotations
    spec.loader.exec_module(module)
    entry = read_entries("accuracy")["published"]
    assert entry["head"] == list(module.HEAD)
    assert entry["rows"] == list(module.table_rows())
