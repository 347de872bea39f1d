"""docs/evidence/study.md: its stored figures agree with the arithmetic and with the page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from evidence_pages import EVIDENCE, read_entries
from jobs import JOBS, PSI
from lab import GB, TRAIN
from parts import PAPER_STATES, PARTS
from support import ROOT

PAGE = (EVIDENCE / "study.md").read_text()
ENTRIES = read_entries("study")
SVG = "{http://www.w3.org/2000/svg}"


def columns(part: str) -> dict[str, list[str]]:
    """Name -> cells of each column of a stored table."""
    cells = zip(*ENTRIES[part]["rows"], strict=True)
    return dict(zip(ENTRIES[part]["head"], map(list, cells), strict=True))


def number(cell: str) -> float:
    """The first number of a cell."""
    match = re.search(r"[-+]?[\d.]+", cell)
    assert match is not None, cell
    return float(match[0])


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_a_table_and_a_light_chart_on_the_page(part: str) -> None:
    assert part in JOBS and re.search(rf"(study.py|,|or) {part}\b", PAGE)
    assert f"<!-- begin: study.{part} -->" in PAGE
    image = EVIDENCE.parent / "images" / f"study-{part}.svg"
    assert f"(../images/{image.name})" in PAGE
    drawn = ElementTree.parse(image).getroot()
    assert drawn.tag == f"{SVG}svg" and int(drawn.attrib["width"]) <= 360
    background = drawn.find(f"{SVG}rect")
    assert background is not None and "rgb(255, 255, 255)" in background.attrib["style"]


def test_a_figure_of_the_virtual_device_says_so() -> None:
    assert all("virtual devices" in entry["machine"] for entry in ENTRIES.values())
    assert "virtual devices" in PAGE and TRAIN.is_relative_to(ROOT)


def test_states_are_those_of_the_paper_and_the_peak_is_explained() -> None:
    table = columns("memory")
    for at, title in enumerate(table["strategy"]):
        paper, peak = PAPER_STATES[title] * PSI / GB, number(table["peak"][at])
        assert number(table["paper"][at]) == pytest.approx(paper, abs=0.05)
        beside = re.findall(r"(?:^|, )([\d.]+) ", table["in the peak beside the states"][at])
        assert paper + sum(map(float, beside)) == pytest.approx(peak, abs=0.2)
        if not table["`plan`"][at].startswith("n/a"):
            rounding = 0.1
            assert abs(number(table["`plan`"][at]) - peak) <= 0.05 * peak + rounding


def test_the_exposed_share_falls_with_the_speed_of_the_link() -> None:
    table = columns("overlap")
    for stage in (2, 3):
        gains, shares = (
            [number(cell) for cell in table[f"ZeRO-{stage}, {name}"]] for name in ("gain", "exposed")
        )
        assert shares == sorted(shares, reverse=True)
        assert min(gains) > 0


def test_memory_and_samples_grow_with_the_batch_until_it_ends() -> None:
    table = columns("batch")
    for stage, peak in ((2, "ZeRO-2, peak"), (3, "ZeRO-3, peak")):
        rates = [cell for cell in table[f"ZeRO-{stage}, samples/s"] if cell != "OOM"]
        peaks = [number(cell) for cell in table[peak] if cell != "OOM"]
        assert peaks == sorted(peaks) and max(peaks) < 80 * 1.0737
        assert len(rates) == len(peaks) < len(table["micro-batch"])
