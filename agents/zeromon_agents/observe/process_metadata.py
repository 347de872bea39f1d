"""What is set in this process and what a remedy may set: variables, threads, autocast. Reads only."""

from __future__ import annotations

import os

import torch

from zeromon.ring.model_metadata import VARIABLES, ProcessMetadata


def of_process(autocast: str) -> ProcessMetadata:
    """Returns the settings of this process. Call it on the training thread, whose threads count."""
    return {
        "variables": {name: os.environ.get(name, "")[:200] for name in VARIABLES},
        "threads": torch.get_num_threads(),
        "autocast": autocast,
    }


def autocast_dtype() -> str:
    """Returns the dtype that autocast computes in on a device, ``bfloat16``; "" where it is off."""
    if not torch.is_autocast_enabled():
        return ""
    return str(torch.get_autocast_gpu_dtype()).removeprefix("torch.")
