"""nvitop: what NVML says of the devices, read beside the run by nvitop's own classes."""

from __future__ import annotations

import json
from typing import Any

from monitor import Monitor, Run

_PROGRAM = """
import json
from nvitop import Device
device = Device(0)
print("FOUND", json.dumps([device.gpu_utilization(), device.memory_used()]))
"""


def _live(run: Run) -> dict[str, Any]:
    lines = [line for line in run.read("python", "-c", _PROGRAM).splitlines() if "FOUND" in line]
    if not lines:
        return {}
    percent, used = json.loads(lines[0].removeprefix("FOUND "))
    answers: dict[str, Any] = {"device memory": used if isinstance(used, int) else None}
    if isinstance(percent, int):
        answers["utilization"] = percent / 100
    return answers


MONITOR = Monitor(
    "nvitop", "nvitop", lines=0,
    answers={"gloo": [], "virtual": ["healthy-ddp", "healthy-zero3", "poor-ddp", "launch-ddp"]},
    live=_live, installed=["nvitop==1.7.2"], url="https://github.com/XuehaiPan/nvitop",
)  # fmt: skip
