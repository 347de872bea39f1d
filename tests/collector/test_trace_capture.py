"""The analysis of captured traces: it has an end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders import MS, rank, summary

from zeromon.collector.requests import Captures, compare_trace
from zeromon.readout.trace_report import check_table
from zeromon.ring.codes import Phase
from zeromon.snapshot.step import Capture, CaptureState
from zeromon.traces.analysis import RankTrace, StepTime


def test_an_analysis_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """A trace may be hostile, or a disk may have gone."""
    captures = Captures(tmp_path, tmp_path / "traces")
    made = Capture(number=1, state="analysing", first=1, steps=2, ranks=(0,), folder=str(tmp_path))
    analysis = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    captures._analysis, captures._analysis_until = analysis, float("inf")
    assert captures._finish_analysis(made, []) is made
    captures._analysis_until = 0.0
    done = captures._finish_analysis(made, [])
    assert done.state == "done" and "was ended after 10 min" in done.note
    assert analysis.returncode is not None


def test_a_launch_bound_rank_and_unknown_communication_are_not_compared() -> None:
    """A trace counts a device that waits for its host as exposed; -1 ns of communication is unknown."""
    launched = (10 * MS,) * len(Phase)
    slow_host = summary(7, launch_ns=launched, starved_ns=80 * MS, communication_ns=-1)
    fast_host = summary(7, launch_ns=launched)
    traced = StepTime(
        step=7, span_seconds=0.1, compute_seconds=0.05, communication_seconds=0.05, exposed_seconds=0.04
    )
    trace = RankTrace(
        rank=0, file="", span_seconds=0.1, compute_seconds=0.05, communication_seconds=0.05,
        exposed_seconds=0.04, exposed_copy_seconds=0.0, idle_seconds=0.0, overlap_ratio=0.2,
        events=1, ops=(), units=(), kernels=(), steps=(traced,),
    )  # fmt: skip
    found = compare_trace(
        [trace, replace(trace, rank=1)], [rank(0, recent=(slow_host,)), rank(1, recent=(fast_host,))]
    )
    assert found[0].error_ratio is None and found[0].live_communication_seconds is None
    assert found[1].error_ratio == pytest.approx(0.01 / 0.04 - 1)
    made = Capture(
        number=1, state=CaptureState.DONE, first=7, steps=1, ranks=(0, 1), folder="", checks=found
    )
    text = check_table(made)
    assert "n/a (launch-bound)" in text and "-75.0 %" in text and "-0" not in text
