"""TraceML: the diagnosis, step timing and memory of final_summary.json."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

import monitor
from monitor import Monitor, Run

TIMES = {
    "step": "step_time_ms", "data": "input_wait_ms", "forward": "forward_ms",
    "backward": "backward_ms", "optimizer": "optimizer_ms",
}  # fmt: skip
CAUSES = {
    "INPUT_BOUND": "input", "BALANCED": "healthy", "COMPUTE_BOUND": "healthy",
    "RESIDUAL_HEAVY": "residual", "CREEP_CONFIRMED": "leak", "CREEP_EARLY": "leak",
}  # fmt: skip


class Lines(monitor.Lines):
    """Its SDK: tracing that is on for each step."""

    def begin(self) -> None:
        import traceml_ai as traceml

        traceml.init(mode="auto")

    def each_step(self, model: Any) -> AbstractContextManager[Any]:
        import traceml_ai as traceml

        step: AbstractContextManager[Any] = traceml.trace_step(model)
        return step


def _launch(run: Run) -> list[str]:
    folder = ["--logs-dir", str(run.folder / "logs"), "--run-name", "job"]
    launcher = [str(run.bin / "traceml"), "run", str(run.program), "--nproc-per-node", "2", *folder]
    return [*launcher, "--args", *run.arguments]


def _after(run: Run) -> dict[str, Any]:
    path = run.folder / "logs" / "job" / "final_summary.json"
    if not path.exists():
        return {}
    summary = json.loads(path.read_text())
    timing = summary["step_time"]
    row = timing["groups"]["rows"].get("0", {}).get("metrics", {})
    answers: dict[str, Any] = {
        name: row[key] / 1e3 for name, key in TIMES.items() if row.get(key) is not None
    }
    memory = summary["step_memory"]
    of_rank = memory.get("groups", {}).get("rows", {}).get("0", {}).get("metrics", {})
    answers["peak"] = of_rank.get("peak_allocated_bytes")
    diagnosis = timing["diagnosis"]
    kind = diagnosis["kind"]
    if "CREEP" in memory["diagnosis"]["kind"]:
        kind = memory["diagnosis"]["kind"]
    answers |= {"rank": "nobody", "cause": CAUSES.get(kind, kind.lower()), "sentence": kind}
    if "STRAGGLER" in kind:
        evidence = diagnosis["evidence"]
        answers |= {
            "cause": "late rank",
            "rank": evidence.get("culprit_rank"),
            "late in": "data" if "INPUT" in kind else diagnosis["phase"],
            "late by": evidence["visible_cost_ms"] / 1e3,
        }
    return answers


MONITOR = Monitor(
    "TraceML", "traceml-ai", lines=3,
    answers={
        "gloo": ["plain", "exchange", "input", "slow", "leak", "death"],
        "virtual": [
            "healthy-ddp", "healthy-fsdp2", "poor-ddp", "poor-fsdp2", "late-*", "launch-ddp",
            "input-ddp", "leak-ddp", "checkpoint-ddp", "uneven-ddp",
        ],
    },
    launch=_launch, after=_after, installed=["traceml-ai==0.5.0"],
    url="https://github.com/traceopt-ai/traceml", forks=False,
)  # fmt: skip
