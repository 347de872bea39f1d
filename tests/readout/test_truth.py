"""Every figure of the first screen beside an independent count: the fast part of tests/bench/truth."""

from __future__ import annotations

import sys

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench" / "truth"))

import ours
import scores


@pytest.mark.parametrize("seed", [1, 2])
def test_the_figures_of_simulated_ranks_are_those_of_arithmetic(seed: int) -> None:
    """Collectives overlap, one rank comes late, memory grows: all figures, to a thousandth."""
    case, shown = ours.simulated(seed)
    found = scores.rows(case, {ours.OURS: shown})
    assert {row.figure for row in found} == set(ours.FIRST_SCREEN)
    errors = {row.figure: row.errors[ours.OURS] for row in found}
    # a trend is a median of slopes; its level is that of the middle of the last block
    assert errors.pop("risk") == pytest.approx(0, abs=0.005)
    assert errors == pytest.approx(dict.fromkeys(errors, 0), abs=1e-6)


def test_a_wrong_and_a_made_up_figure_are_errors() -> None:
    """A ratio is compared by its difference, a time below a hundredth of a step with that hundredth."""
    truths = {
        "a": scores.Truth({0: [0.5], 1: [0.25]}, "ratio", ""),
        "b": scores.Truth({0: [0.0]}, "s", ""),
        "c": scores.Truth({0: [None]}, "bytes", ""),
        "d": scores.Truth({0: [3.0]}, "", ""),
    }
    shown = {"a": {0: [0.5], 1: [0.5]}, "b": {0: [0.0005]}, "c": {0: [0.0]}}
    found = scores.rows(scores.Case("x", 0.1, truths), {"m": shown, "n": {"c": {0: [None]}}})
    errors = [row.errors["m"] for row in found]
    assert errors == [0.25, pytest.approx(0.5), float("inf"), None]
    assert [row.errors["n"] for row in found] == [None, None, 0.0, None]
    assert "made up" in scores.table(found, ["m", "n"])
