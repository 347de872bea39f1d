"""DeepSpeed's comms_logger: the table of log_summary(), of the calls that go through deepspeed.comm."""

from __future__ import annotations

import re
from typing import Any

import monitor
from monitor import Monitor, Run

_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_ROW = re.compile(r"^ +([\d.]+) (B|KB|MB|GB) +(\d+) +([\d.]+) ", re.MULTILINE)


class Lines(monitor.Lines):
    """deepspeed.comm in place of torch.distributed, or the setting of an engine."""

    def begin(self) -> None:
        import deepspeed
        import torch.distributed as dist

        deepspeed.init_distributed(dist.get_backend())
        deepspeed.comm.configure(enabled=True, prof_all=True, verbose=False, debug=False)

    def communicator(self) -> Any:
        import deepspeed

        return deepspeed.comm

    def deepspeed_settings(self) -> dict[str, Any]:
        return {"comms_logger": {"enabled": True, "prof_all": True, "verbose": False, "debug": False}}

    def end(self) -> None:
        import deepspeed

        deepspeed.comm.log_summary()


def _after(run: Run) -> dict[str, Any]:
    """Bytes, calls and time per step."""
    rows, steps = _ROW.findall(run.output), run.case["steps"]
    if not rows:
        return {}
    return {
        "bytes": sum(float(size) * _UNITS[unit] * int(calls) for size, unit, calls, _ in rows) / steps,
        "calls": sum(int(calls) for *_, calls, _ in rows) // steps,
        "exposed" if run.kind == "gloo" else "communication": sum(float(ms) for *_, ms in rows)
        / 1e3
        / steps,
    }


MONITOR = Monitor(
    "comms_logger", "deepspeed", lines=4,
    answers={"gloo": ["exchange"], "virtual": ["healthy-zero*"]}, after=_after,
)  # fmt: skip
