"""torch.profiler's trace of some steps, read by HolisticTraceAnalysis.

Of its figures one concludes: a rank that computes longer than the other is late; else communication
that nothing hides, or a device that waits for its host.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import monitor
from monitor import Monitor, Run, Shown

WAIT, WARM_UP, ACTIVE = 20, 3, 10
TRACED = (WAIT + WARM_UP, WAIT + WARM_UP + ACTIVE - 2)
"""Without the last step, behind which it writes the trace."""
LATE, EXPOSED, IDLE = 1.2, 0.1, 0.3
"""From how many times the other's computation, and from which shares of a step, one concludes."""
_PROGRAM = """
import json, logging, sys, warnings
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
traces = {rank: path for rank, path in enumerate(sys.argv[1:])}
analysis = TraceAnalysis(trace_files=traces, trace_dir="", include_last_profiler_step=True)
ranks = analysis.get_temporal_breakdown(visualize=False).sort_values("rank")
found = ranks.iloc[0].to_dict() | {"computes": ranks["compute_time(us)"].tolist()}
idle = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)[0]
streams = [rows for _, rows in idle.groupby("stream")]
busiest = min(streams, key=lambda rows: rows.idle_time.sum())
found["idle for"] = busiest.sort_values("idle_time").idle_category.iloc[-1]
found |= analysis.get_comm_comp_overlap(visualize=False).iloc[0].to_dict()
print("FOUND " + json.dumps(found, default=float))
"""


class Lines(monitor.Lines):
    """A schedule, a trace of its steps, and a call per step."""

    def begin(self) -> None:
        from torch import profiler

        self.profiler = profiler.profile(
            schedule=profiler.schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1),
            on_trace_ready=self.write,
        )
        self.profiler.start()

    def write(self, profiler: Any) -> None:
        """The trace of this rank."""
        profiler.export_chrome_trace(f"{os.environ['TRUTH']}/trace{os.environ['RANK']}.json")

    def each_step(self, model: Any) -> AbstractContextManager[Any]:
        @contextmanager
        def step() -> Iterator[None]:
            yield
            self.profiler.step()

        return step()

    def end(self) -> None:
        self.profiler.stop()


def _after(run: Run) -> dict[str, Any]:
    traces = [run.folder / f"trace{rank}.json" for rank in range(2)]
    if not all(trace.exists() for trace in traces):
        return {}
    from bench_traces import hta_python

    words = [str(hta_python()), "-c", _PROGRAM, *map(str, traces)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        return {"sentence": (done.stderr.strip() or "no figures").splitlines()[-1]}
    figures = json.loads(lines[0].removeprefix("FOUND "))
    overlap = figures["comp_comm_overlap_pctg"] / 100
    exposed = figures["non_compute_time(us)"] / 1e6 / ACTIVE
    step = figures["kernel_time(us)"] / 1e6 / ACTIVE
    idle = figures["idle_time(us)"] / figures["kernel_time(us)"]
    answers = {
        "step": Shown(step), "exposed": exposed, "overlap": overlap, "utilization": 1 - idle,
        "rank": Shown("nobody"),
    }  # fmt: skip
    computes = figures["computes"]
    if max(computes) > LATE * min(computes):
        return answers | {
            "cause": Shown("late rank"), "rank": Shown(computes.index(max(computes))),
            "late by": Shown((max(computes) - min(computes)) / 1e6 / ACTIVE),
        }  # fmt: skip
    if exposed > EXPOSED * step:
        return answers | {"cause": Shown("communication")}
    waits = idle > IDLE and figures["idle for"] == "host_wait"
    return answers | {"cause": Shown("launch" if waits else "healthy")}


MONITOR = Monitor(
    "torch.profiler + HTA", "torch", lines=7,
    answers={
        "gloo": [],
        "virtual": [
            "healthy-*", "poor-*", "late-ddp", "late-fsdp2", "launch-ddp", "input-ddp", "uneven-ddp",
        ],
    },
    steps=TRACED, after=_after,
    url="https://github.com/facebookresearch/HolisticTraceAnalysis",
)  # fmt: skip
