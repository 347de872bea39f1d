"""Every figure of the first screen beside an independent count: the fast part of tests/bench/truth."""

from __future__ import annotations

import sys

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench" / "truth"))

import ours
import real
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


def test_a_trace_of_the_profiler_is_counted_with_and_without_the_calls() -> None:
    """gloo works 100 us, an operator hides 30 of them; the call before lasts 20, 6 of them copying."""
    spans = {
        ("truth:optimizer:1", 1): (0, 5), ("c10d::allreduce_", 1): (10, 30),
        ("aten::copy_", 1): (12, 18), ("gloo:all_reduce", 9): (30, 130),
        ("aten::mm", 1): (40, 70), ("aten::add", 9): (50, 90),
        ("truth:forward:2", 1): (100, 120), ("truth:optimizer:2", 1): (140, 150),
    }  # fmt: skip
    trace = real._Trace(
        {"ph": "X", "cat": "cpu_op", "name": name, "tid": thread, "ts": start, "dur": end - start}
        for (name, thread), (start, end) in spans.items()
    )
    step = trace.step(2)
    assert step == (5, 150)
    assert trace.communicated([step]) == 100
    assert trace.exposed([step]) == 70
    assert trace.exposed([step], with_calls=True) == 90
    assert trace.exposed([trace.marks["forward", 2]]) == 20
