"""probing: SQL over the modules that it samples in each rank, and the stack of a stuck rank."""

from __future__ import annotations

import re
from typing import Any

from monitor import Monitor, Run, Shown

_MEAN = "select avg(duration) from python.torch_trace where module = '{}' and stage = '{}' and step > 20"
_NUMBER = re.compile(r"^│ (\d+\.\d+)", re.MULTILINE)


def _mean(run: Run, pid: int, module: str, stage: str) -> float | None:
    """A number that it answers in a table."""
    table = run.read("probing", "-t", str(pid), "query", _MEAN.format(module, stage))
    number = _NUMBER.search(table)
    return float(number[1]) if number else None


def _live(run: Run) -> dict[str, Any]:
    pids = run.pids()
    if run.must_name:
        stacks = [run.read("probing", "-t", str(pid), "backtrace") for pid in pids]
        stuck = [rank for rank, stack in enumerate(stacks) if "stand_still" in stack]
        if not stuck:
            return {}
        return {"cause": Shown("hang"), "rank": Shown(stuck[0]), "stuck in": Shown("stand_still")}
    net = "Net" if run.name == "exchange" else "module"
    forwards = [_mean(run, pid, net, "post forward") for pid in pids]
    answers: dict[str, Any] = {"forward": forwards[0] if forwards else None}
    answers["optimizer"] = _mean(run, pids[0], "AdamW", "post step") if pids else None
    times = [seconds for seconds in forwards if seconds is not None]
    if len(times) == len(forwards) == 2 and max(times) > 2 * min(times):
        answers |= {
            "cause": Shown("late rank"), "rank": Shown(forwards.index(max(times))),
            "late in": Shown("forward"), "late by": Shown(max(times) - min(times)),
        }  # fmt: skip
    return answers


MONITOR = Monitor(
    "probing", "probing", lines=0,
    answers={
        "gloo": ["plain", "input", "slow", "hang"],
        "virtual": ["healthy-ddp", "late-ddp", "hang-ddp"],
    },
    environment={"PROBING": "{program}", "PROBING_TORCH_PROFILING": "on"},
    live=_live, installed=["probing==0.2.4"], url="https://github.com/reiase/probing",
    forks=False,
)  # fmt: skip
