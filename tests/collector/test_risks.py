"""The onset of a growth, which outlasts the steps that a snapshot has."""

from __future__ import annotations

import pytest
from builders import rank, summary

from zeromon.collector.run import Risks
from zeromon.snapshot import RankSnapshot

GIB, SECOND, WINDOW = 1 << 30, 10**9, 512


def followed(grown_at: dict[int, int], last: int) -> list[tuple[int, int, int]]:
    """Last step, onset and bytes grown, every ten steps; *grown_at*: step -> bytes a step since it."""
    used, slope, levels = 2 * GIB, 0, []
    for step in range(1, last + 1):
        slope = grown_at.get(step, slope)
        used += slope
        levels.append(summary(step, rss_bytes=used))
    risks, found = Risks(), []
    for end in range(60, last + 1, 10):
        recent = tuple(levels[max(0, end - WINDOW) : end])
        one: RankSnapshot = rank(
            0, recent=recent, last_step=end, rss_bytes=recent[-1].rss_bytes, host_available_bytes=6 * GIB
        )
        (risk,) = risks.update([one], end * SECOND)[0]
        found.append((end, risk.since_step, risk.grown_bytes))
    return found


def test_a_long_leak_keeps_its_first_step() -> None:
    """2 MiB per step from step 40 on, seen at step 2,000 through the last 512 steps."""
    found = followed({40: 2 << 20}, 2000)
    onsets = {since for end, since, _ in found if end > 120}
    assert len(onsets) == 1 and 35 <= onsets.pop() <= 43
    assert found[-1][2] == pytest.approx(1960 * (2 << 20), rel=0.02)


def test_a_leak_after_a_slow_growth_has_a_first_step_of_its_own() -> None:
    """64 KiB per step from the start, which is not where 4 MiB per step from step 1,000 on began."""
    found = followed({1: 64 << 10, 1000: 4 << 20}, 2000)
    onsets = [since for end, since, _ in found if end > 1200]
    assert min(onsets) >= 990
    assert max(onsets[:5]) <= 1010


def test_a_leak_that_ends_does_not_lend_its_first_step_to_the_next() -> None:
    found = followed({40: 2 << 20, 400: 0, 1200: 2 << 20}, 1900)
    assert [since for end, since, _ in found if end > 1400] != []
    assert all(since >= 1190 for end, since, _ in found if end > 1400)


def test_a_run_without_ranks_has_no_risks() -> None:
    assert Risks().update([], SECOND) == {}
