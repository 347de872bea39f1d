"""docs/evidence/public-cases.md: each verdict has a test that exists, or a reason."""

from __future__ import annotations

from evidence_pages import read_entries
from support import ROOT


def page_rows() -> list[list[str]]:
    """The cells of each case."""
    return [row for entry in read_entries("public-cases").values() for row in entry["rows"]]


def test_every_case_has_a_verdict_and_all_but_the_right_ones_a_reason() -> None:
    assert len(page_rows()) >= 30
    for case, *_, verdict, _ in page_rows():
        word, _, reason = verdict.partition(" ")
        assert word.strip(":;") in ("right", "partly", "no"), case
        assert word == "right" or word.strip(";") == "right" or len(reason) > 20, case


def test_every_test_that_the_page_names_exists() -> None:
    for case, *_, test in page_rows():
        if test != "none":
            path, _, name = test.strip("`").partition("::")
            assert f"def {name}" in (ROOT / path).read_text(), case
