"""DeepSpeed's flops profiler: the latencies of one step, printed once."""

from __future__ import annotations

import re
from typing import Any

import monitor
from monitor import Monitor, Run

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
LATENCIES = {"step": "iter latency", "forward": "fwd latency", "backward": "bwd latency",
             "optimizer": "step latency"}  # fmt: skip


class Lines(monitor.Lines):
    """A setting of the engine."""

    def deepspeed_settings(self) -> dict[str, Any]:
        return {"flops_profiler": {"enabled": True, "profile_step": 30, "detailed": False}}


def _after(run: Run) -> dict[str, Any]:
    answers = {}
    for name, label in LATENCIES.items():
        figure = re.search(rf"^{label}:? .*?([\d.]+) (s|ms|us)\s*$", run.output, re.MULTILINE)
        if figure is not None:
            answers[name] = float(figure[1]) * _UNITS[figure[2]]
    return answers


MONITOR = Monitor(
    "flops profiler", "deepspeed", lines=1,
    answers={"gloo": [], "virtual": ["healthy-zero*"]}, after=_after, steps=(30, 30),
)  # fmt: skip
