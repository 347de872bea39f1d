"""The analysis of captured traces: it has an end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from zeromon.collector.trace_capture import Captures
from zeromon.snapshot import Capture


def test_an_analysis_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """A trace may be hostile, or a disk may have gone."""
    captures = Captures(tmp_path, tmp_path / "traces")
    made = Capture(number=1, state="analysing", first=1, steps=2, ranks=(0,), folder=str(tmp_path))
    analysis = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    captures._analysis, captures._analysis_until = analysis, float("inf")
    assert captures._analysed(made, []) is made
    captures._analysis_until = 0.0
    done = captures._analysed(made, [])
    assert done.state == "done" and "was ended after 10 min" in done.note
    assert analysis.returncode is not None
