"""docs/evidence/public-cases.md: each verdict has a test that exists, or a reason."""

from __future__ import annotations

import re

from support import ROOT

PAGE = ROOT / "docs" / "evidence" / "public-cases.md"


def page_rows() -> list[list[str]]:
    """The cells of each case."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [re.split(r" \| ", line.strip("| ")) for line in lines[1:]]


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
