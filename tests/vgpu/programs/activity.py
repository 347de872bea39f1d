"""A second each of matrix products and of additions, with pauses; zeromon's reading of each by NVML."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from zeromon.probes.nvml import Nvml

MATRIX = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
VECTOR = torch.empty(1 << 28, device="cuda")
LOADS: dict[str, Callable[[], object]] = {
    "products": lambda: MATRIX @ MATRIX,
    "additions": lambda: VECTOR.add_(1),
    "nothing": lambda: None,
}


def keep_busy(launch: Callable[[], object], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for _ in range(10):
            launch()
        torch.cuda.synchronize()
        time.sleep(0.01)


library = Nvml()
uuid = library.uuids()[0]
readings = {}
for name, launch in LOADS.items():
    keep_busy(launch, 0.2)  # the device counts its activity every 50 ms
    library.read(uuid, time.monotonic_ns())
    began = time.monotonic_ns()
    keep_busy(launch, 1.0)
    device = library.read(uuid, time.monotonic_ns())
    assert device is not None
    shares = device.sm_active_ratio, device.tensor_active_ratio, device.dram_active_ratio
    readings[name] = [began, time.monotonic_ns(), *shares]
print("readings", json.dumps(readings))
