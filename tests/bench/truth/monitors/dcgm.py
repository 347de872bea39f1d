"""DCGM: the host engine of NVIDIA, which reads the driver."""

from __future__ import annotations

import shutil

from monitor import Monitor, Run


def _reason(run: Run) -> str:
    """Why the host engine does not start."""
    if shutil.which("nv-hostengine") is None:
        return "not in the registries of Python or Debian, and it needs NVIDIA's driver"
    return "it needs NVIDIA's driver"


MONITOR = Monitor(
    "DCGM", "", lines=0, answers={"gloo": [], "virtual": []}, reason=_reason,
    url="https://github.com/NVIDIA/DCGM",
)  # fmt: skip
