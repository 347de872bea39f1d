"""Runs a program of tests/vgpu as a rank on the one GPU, traced by torch.profiler.

``traced.py FOLDER PROGRAM ...``: the trace and the names of the marks go to FOLDER as ``RANK.json``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch
from shared_gpu import share
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vgpu import marks


def main() -> None:
    folder, program, *words = sys.argv[1:]
    rank = os.environ["RANK"]
    share(rank)
    os.environ["LOCAL_RANK"] = "0"
    torch.cuda.set_device(0)
    marks.names = []
    sys.argv = [program, *words]
    trace = Path(folder, f"{rank}.trace")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        runpy.run_path(program, run_name="__main__")
    profiler.export_chrome_trace(str(trace))
    content = json.loads(trace.read_text())
    trace.unlink()
    kept = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    Path(folder, f"{rank}.json").write_text(json.dumps({"traceEvents": kept, "marks": marks.names}))


if __name__ == "__main__":
    main()
