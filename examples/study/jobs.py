"""The training runs of each part of the study."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from lab import RANKS, Job

SEVEN_BILLION = {"width": 4096, "layers": 34, "heads": 32, "positions": 36_860}
"""6,999,998,464 parameters: the rows of the position embedding fill the model up."""
PSI = 34 * (12 * 4096**2 + 13 * 4096) + (2 * 256 + 36_860 + 2) * 4096
ALL_STATES = "200GiB"
"""Memory of a virtual device that holds every state of the model."""

STRATEGIES = {
    "DDP": ("ddp", {}),
    "DDP, gradients in buckets": ("ddp", {"gradient_as_bucket_view": True}),
    "ZeRO-1": ("zero1", {}),
    "ZeRO-2": ("zero2", {}),
    "ZeRO-3": ("zero3", {}),
    "FSDP1": ("fsdp1", {}),
    "FSDP2": ("fsdp2", {}),
}
MEMORY = {
    title: Job(strategy, {**SEVEN_BILLION, "length": 128}, settings, ALL_STATES)
    for title, (strategy, settings) in STRATEGIES.items()
}
"""Short sequences, so that nearly all memory is states."""


def _zero3_keeping(distance: float, live: float = 1e9) -> Job:
    names = ("stage3_max_reuse_distance", "stage3_max_live_parameters")
    settings = dict(zip(names, (int(distance), int(live)), strict=True))
    return Job("zero3", {**SEVEN_BILLION, "length": 128}, settings, ALL_STATES)


REUSE_DISTANCES = (0, 4e9, 8e9, 16e9)
REUSE = {distance: _zero3_keeping(distance) for distance in REUSE_DISTANCES}
LOW_LIVE = {distance: _zero3_keeping(distance, live=1e8) for distance in (0, 16e9)}
REDUCING = Job(
    "zero2", {**SEVEN_BILLION, "length": 128}, {"use_multi_rank_bucket_allreduce": False}, ALL_STATES
)

LINK_SPEEDS = (12.5e9, 25e9, 50e9, 100e9, 200e9)
OVERLAP = {
    (stage, speed, overlaps): Job(
        f"zero{stage}", {**SEVEN_BILLION, "length": 2048, "batch": 2}, {"overlap_comm": overlaps},
        ALL_STATES, {"node_speed": speed},
    )
    for stage in (2, 3)
    for speed in LINK_SPEEDS
    for overlaps in (False, True)
}  # fmt: skip

BATCHES = (1, 2, 4, 8, 10, 11, 12)
BATCH = {
    (stage, batch): Job(
        f"zero{stage}", {**SEVEN_BILLION, "length": 1024, "batch": batch}, {"overlap_comm": True}
    )
    for stage in (2, 3)
    for batch in BATCHES
}
"""On devices of 80 GB."""

PCIE_SPEEDS = (6e9, 12e9, 25e9, 54e9)
SMALL = {"width": 4096, "layers": 4, "length": 1024, "batch": 4}
_ON_HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
RESIDENT = {stage: Job(f"zero{stage}", SMALL, {"overlap_comm": True}) for stage in (2, 3)}
OFFLOAD = {
    (stage, speed): Job(
        f"zero{stage}", SMALL, {"overlap_comm": True, **_ON_HOST}, changes={"pinned_speed": speed}
    )
    for stage in (2, 3)
    for speed in PCIE_SPEEDS
}
"""0.8 billion parameters: offloaded states are real memory of this machine."""

RECOMPUTED = (0, 9, 17, 34)
CHECKPOINTING = {
    layers: Job(
        "zero3", {**SEVEN_BILLION, "length": 2048, "batch": 4, "recomputed": layers}, {}, ALL_STATES
    )
    for layers in RECOMPUTED
}

JOBS = {
    "memory": list(MEMORY.values()),
    "volumes": [*MEMORY.values(), REDUCING, *REUSE.values(), *LOW_LIVE.values()],
    "overlap": list(OVERLAP.values()),
    "batch": list(BATCH.values()),
    "offload": [*RESIDENT.values(), *OFFLOAD.values()],
    "checkpointing": list(CHECKPOINTING.values()),
}

PLAN_MODEL = {
    "model_type": "gpt2", "n_embd": 4096, "n_layer": 34, "n_head": 32, "n_positions": 36_860,
    "vocab_size": 256, "tie_word_embeddings": False, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
}  # fmt: skip
"""The model of :data:`SEVEN_BILLION` as a config.json for `zeromon plan`."""
_PLAN_PRECISION = {"ddp": "autocast", "fsdp1": "fsdp-mixed", "fsdp2": "fsdp-mixed"}


def plan_peak(folder: Path, strategy: str) -> int:
    """Returns the peak bytes of a device that `zeromon plan` predicts for a run of :data:`MEMORY`."""
    framework = "deepspeed" if strategy.startswith("zero") else strategy
    stage = int(strategy[-1]) if framework == "deepspeed" else 0 if strategy == "ddp" else 3
    return next(
        int(row["bytes"]["device"]) for row in plan_rows(folder, framework)
        if (row["framework"], row["stage"], row["optimizer_on"], row["params_on"])
        == (framework, stage, "device", "device")
    )  # fmt: skip


@cache
def plan_rows(folder: Path, framework: str) -> list[dict[str, Any]]:
    """Returns what `zeromon plan` predicts for every stage of *framework*."""
    model = folder / "config.json"
    model.write_text(json.dumps(PLAN_MODEL))
    words = ["--devices", str(RANKS), "--gpu", ALL_STATES, "--micro-batch", "1", "--length", "128"]
    words += ["--optimizer", "adamw-fused", "--framework", framework]
    words += ["--precision", _PLAN_PRECISION.get(framework, "mixed"), "--json"]
    command = [sys.executable, "-m", "zeromon", "plan", str(model), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows
