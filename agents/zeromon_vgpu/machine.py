"""The virtual machine of a run, and the faults that a test plans: written for the C++ model to read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30

PROFILES: dict[str, dict[str, float | str]] = {
    "h100": {},
    "h200": {"name": "NVIDIA H200", "memory_bytes": 139.8 * GIB, "memory_speed": 4.25e12},
    "a100": {
        "name": "NVIDIA A100-SXM4-80GB", "major": 8, "multiprocessors": 108, "clock_hz": 1.41e9,
        "flops_fp64": 15e12, "flops_fp32": 17e12, "flops_tf32": 130e12, "flops_half": 250e12,
        "flops_fp8": 250e12, "memory_speed": 1.8e12, "pinned_speed": 24e9, "node_speed": 230e9,
        "network_speed": 22e9,
    },
}  # fmt: skip
"""Values that differ from an H100, whose figures are in src/machine.h.

Times, and the speeds of the H200, are those that tests/gpu/calibration.py measured on one. Speeds are
those that large kernels reach, not the peak of the data sheet. ``contention 0`` and
``collective_share 0`` let kernels run at full speed whatever runs beside them.
"""


IDENTITIES: dict[str, tuple[str, int, int, int, float]] = {
    "a100-40": ("NVIDIA A100-SXM4-40GB", 8, 0, 108, 1.41e9),
    "a100": ("NVIDIA A100-SXM4-80GB", 8, 0, 108, 1.41e9),
    "a100-80": ("NVIDIA A100-SXM4-80GB", 8, 0, 108, 1.41e9),
    "h100": ("NVIDIA H100 80GB HBM3", 9, 0, 132, 1.98e9),
    "h200": ("NVIDIA H200", 9, 0, 132, 1.98e9),
    "b200": ("NVIDIA B200", 10, 0, 148, 1.965e9),
    "l4": ("NVIDIA L4", 8, 9, 58, 2.04e9),
    "l40s": ("NVIDIA L40S", 8, 9, 142, 2.52e9),
    "a10": ("NVIDIA A10", 8, 6, 72, 1.695e9),
    "v100": ("Tesla V100-SXM2-32GB", 7, 0, 80, 1.53e9),
    "v100-16": ("Tesla V100-SXM2-16GB", 7, 0, 80, 1.53e9),
    "t4": ("Tesla T4", 7, 5, 40, 1.59e9),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 8, 9, 128, 2.52e9),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 8, 6, 82, 1.695e9),
    "mi300x": ("AMD Instinct MI300X", 9, 0, 304, 2.1e9),
}
"""The name of a device, its compute capability, multiprocessors and clock in Hz, by data sheets.

A wheel for CUDA knows no MI300X: it runs as a device of capability 9.0 with that memory and speed.
"""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong by plan; ``at`` counts seconds from the start of the run.

    | kind | what happens |
    |---|---|
    | slow | kernels of the rank take ``factor`` times as long |
    | late | the rank comes ``seconds`` later to its collective number ``call`` |
    | link | collectives have a ``factor``-th of their bandwidth |
    | stuck | the rank's collective number ``call`` never starts |
    | flip | bit ``bit`` of what the rank's collective number ``call`` receives is flipped |
    | full | the device has ``factor`` of its memory |
    | lost | every call fails, also NVML's, as when a device falls off the bus |
    | xid, ecc, throttle | NVML reports ``code``, ``factor`` errors, or the reasons ``code`` |
    """

    kind: str
    rank: int | None = None
    device: int | None = None
    at: float = 0.0
    factor: float = 1.0
    call: int | None = None
    seconds: float = 0.0
    bit: int = 0
    code: int = 0

    def line(self) -> str:
        """How the model reads it."""
        chosen = {"rank": self.rank, "device": self.device, "call": self.call}
        keys = {key: value for key, value in chosen.items() if value is not None}
        for name in ("at", "factor", "seconds", "bit", "code"):
            keys[name] = getattr(self, name)
        return f"fault {self.kind} " + " ".join(f"{key}={value}" for key, value in keys.items())


def write_machine(
    folder: Path,
    device: str = "h100",
    faults: Sequence[Fault] = (),
    changes: Mapping[str, float | str] | None = None,
) -> None:
    """Writes the file ``machine`` of a run that starts now."""
    values = {"started": time.monotonic(), **PROFILES[device], **(changes or {})}
    rows = [f"{name} {value}" for name, value in values.items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine").write_text("\n".join([*rows, *(fault.line() for fault in faults)]) + "\n")
