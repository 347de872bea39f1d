"""The slopes of a soak: right on figures that are known, and read from a file that was cut."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import soak


@pytest.mark.parametrize("true_slope", [0.0, 5.0])
def test_a_slope_is_within_its_interval(true_slope: float) -> None:
    """Two processes at levels of their own, and noise that lasts for some samples."""
    draw = random.Random(7)
    within = 0
    for _ in range(40):
        processes, noise = [], 0.0
        for level in (1000.0, 5000.0):
            series = []
            for at in range(300):
                noise = 0.7 * noise + draw.gauss(0, 20)
                series.append((60.0 * at, level + true_slope * 60.0 * at / 3600 + noise))
            processes.append(series)
        known = soak.slope(processes)
        assert known is not None
        within += abs(known[0] * 3600 - true_slope) <= known[1] * 3600
    assert within >= 32


def test_a_cut_file_has_a_report(tmp_path: Path) -> None:
    row = {"name": "collector", "pid": 7, "descriptors": 9, "threads": 2, "pss": 1_000_000}
    lines = [json.dumps(row | {"seconds": 60.0 * n, "rss": 1_000_000 + 50_000 * n}) for n in range(99)]
    event = json.dumps({"seconds": 120.0, "event": "fill the store"})
    (tmp_path / "f").write_text("\n".join([event, *lines, lines[0][:30]]))
    text = soak.report(tmp_path / "f")
    assert text.startswith("1.63 hours; fill the store after 0.03 h")
    assert "| collector | 99 | 9, 9, 9 | 2, 2 |" in text and "| +3.00 ± 0.00 | +0.00 ± 0.00 |" in text
