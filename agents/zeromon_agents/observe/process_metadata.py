"""What is set in this process and what a remedy may set: variables, threads, autocast. Reads only."""

from __future__ import annotations

import os
import re

import torch

from zeromon.ring.model_metadata import VARIABLES, ProcessMetadata
from zeromon_agents.hooks.functional import unknown_operators
from zeromon_agents.hooks.payloads import PAYLOADS

_RETURNS_WORK = re.compile(r"-> \S*\bWork$", re.MULTILINE)
_NO_COLLECTIVE = frozenset(("_end_coalescing", "reconfigure"))
"""Methods that return a Work and are no collective."""


def of_process(autocast: str, allocator: str) -> ProcessMetadata:
    """Returns the settings of this process. Call it on the training thread, whose threads count."""
    return {
        "variables": {name: os.environ.get(name, "")[:200] for name in VARIABLES},
        "threads": torch.get_num_threads(),
        "autocast": autocast,
        "allocator": allocator,
        "unknown_collectives": [
            *unknown_collectives(torch._C._distributed_c10d.ProcessGroup),
            *unknown_operators(),
        ],
    }


def unknown_collectives(group_class: type) -> list[str]:
    """Returns a newer torch's collectives: methods that return a Work and that no hook knows.

    They are counted, and not timed.
    """
    known = _NO_COLLECTIVE.union(PAYLOADS)
    methods = {
        n: getattr(m, "__doc__", None) for n, m in vars(group_class).items() if n not in known
    }
    return sorted(name for name, text in methods.items() if _RETURNS_WORK.search(text or ""))


def autocast_dtype(device_type: str) -> str:
    """Returns the dtype that autocast computes in on a device, ``bfloat16``; "" where it is off."""
    if not device_type or not torch.is_autocast_enabled(device_type):
        return ""
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
