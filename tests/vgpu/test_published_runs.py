"""docs/evidence/memory.md: what `zeromon preflight` says of published runs, run anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from published_figures import GIB, PublishedRun, page_rows

from vgpu.environment import Environment
from vgpu.preflights import preflight_published
from vgpu.test_user_programs import need

pytestmark = pytest.mark.vgpu

PAGE_ERROR, PEAK_ERROR = 0.01, 0.03
SOME = ("torchtune 389", "stanford_alpaca 46")
"""Sources whose runs the ordinary set has; all others are long."""
NEEDED = {"--lora-rank": "peft", "--fused-loss": "liger_kernel"}
"""Option -> the package that figure.py imports for it."""

RUNS = [row for row in page_rows() if not row.preflight.startswith("n/a")]


def test_most_runs_of_the_page_are_run() -> None:
    """The others say why they are not."""
    assert len(RUNS) >= 24
    assert all(re.fullmatch(r"n/a \(.+\)", row.preflight) for row in page_rows() if row not in RUNS)


def marks_of(row: PublishedRun) -> list[pytest.MarkDecorator]:
    """All but some are long."""
    return [] if row.source in SOME else [pytest.mark.long]


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=f"{r.model} {r.options}", marks=marks_of(r)) for r in RUNS]
)
def test_a_preflight_says_what_others_have_measured(
    row: PublishedRun, virtual_cuda: Environment, tmp_path: Path
) -> None:
    for option, package in NEEDED.items():
        if option in row.options:
            need(virtual_cuda, package)
    found = preflight_published(virtual_cuda, tmp_path, row.model, row.options)
    is_oom = row.reported.startswith("OOM")
    assert found["outcome"] == ("out of memory" if is_oom else "")
    assert found["fits"] is not is_oom
    assert ("OOM" in row.preflight) is is_oom
    if not is_oom:
        shown, peak = re.match(r"([\d.]+) GiB", row.preflight), found["peak_bytes"] / GIB
        assert shown is not None
        assert peak == pytest.approx(float(shown[1]), rel=PAGE_ERROR, abs=0.1)
        measured = re.search(r"([\d.]+) GiB", row.reported)
        if measured is not None:
            assert peak == pytest.approx(float(measured[1]), rel=PEAK_ERROR)
