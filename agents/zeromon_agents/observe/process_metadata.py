"""Settings of this process and those that a remedy may set: variables, threads, autocast. Reads only."""

import functools
import os
import platform
import re
import sys
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zeromon.ring.masking import is_secret_name, mask_words
from zeromon.ring.model_metadata import (
    PACKAGES,
    VARIABLE_FAMILIES,
    VARIABLES,
    GoalMetadata,
    ProcessMetadata,
)
from zeromon_agents.hooks.functional import unknown_operators
from zeromon_agents.hooks.process_groups import PAYLOADS
from zeromon_agents.observe.model_metadata import name_of
from zeromon_agents.runtime.hook_context import HookContext

_RETURNS_WORK = re.compile(r"-> \S*\bWork$", re.MULTILINE)
_LONGEST, _MAX_VARIABLES = 200, 100
_START_TICKS = 19
"""The index of the start time among the fields of /proc/PID/stat that follow the program's name."""
_NO_COLLECTIVE = frozenset(("_end_coalescing", "reconfigure"))
"""Methods that return a Work and are no collective."""


@functools.cache
def process_start_ns() -> int:
    """Returns CLOCK_MONOTONIC of the start of this process; now where /proc does not say."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[_START_TICKS])
        suspended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK") - suspended_ns
    return time.monotonic_ns()


def of_process(autocast: str, allocator: str) -> ProcessMetadata:
    """Returns the settings of this process. Call it on the training thread, whose threads count."""
    return {
        "variables": recorded_variables(),
        "packages": package_versions(),
        "folder": script_folder(),
        "threads": torch.get_num_threads(),
        "autocast": autocast,
        "allocator": allocator,
        "seed": torch.initial_seed(),
        "unknown_collectives": [
            *unknown_collectives(torch._C._distributed_c10d.ProcessGroup),
            *unknown_operators(),
            *own_collectives(type(pg) for pg in torch.distributed.distributed_c10d._world.pg_map),
        ],
    }


def recorded_variables() -> dict[str, str]:
    """Returns the environment variables that are recorded; the value of a secret is not among them."""
    names = sorted(n for n in os.environ if n.startswith(VARIABLE_FAMILIES))
    public_names = [n for n in names if not is_secret_name(n)]
    every = dict.fromkeys((*VARIABLES, *public_names[:_MAX_VARIABLES]))
    return {name: mask_words([os.environ.get(name, "")])[0][:_LONGEST] for name in every}


def package_versions() -> dict[str, str]:
    """Returns the versions of what this process has loaded; imports nothing."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        version = vars(sys.modules[name]).get("__version__") if name in sys.modules else None
        if isinstance(version, str):
            versions[name] = version[:_LONGEST]
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    versions |= {name: version for name, version in built.items() if version}
    if torch.distributed.is_nccl_available():
        with suppress(AttributeError, RuntimeError):  # a build that does not say
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def script_folder() -> str:
    """Returns the folder of the script that runs; the process's own for a module or a console."""
    script = Path(sys.argv[0]) if sys.argv else Path()
    try:
        return str(script.resolve().parent if script.is_file() else Path.cwd())
    except OSError:
        return ""


def unknown_collectives(group_class: type) -> list[str]:
    """Returns a newer torch's collectives: methods that return a Work and that no hook knows.

    They are counted, and not timed.
    """
    expected = _NO_COLLECTIVE.union(PAYLOADS)
    methods = {n: getattr(m, "__doc__", None) for n, m in vars(group_class).items() if n not in expected}
    return sorted(name for name, doc in methods.items() if _RETURNS_WORK.search(doc or ""))


def own_collectives(groups: Iterable[type]) -> list[str]:
    """Returns the collectives that classes of process groups written in Python have of their own.

    They pass no hook, and such a group has no sequence number by which they could be counted.
    """
    base = torch._C._distributed_c10d.ProcessGroup
    kinds = {c for group in groups for c in group.__mro__ if issubclass(c, base) and c is not base}
    return sorted(f"{c.__name__}.{name}" for c in kinds for name in PAYLOADS if name in vars(c))


def autocast_dtype(device_type: str) -> str:
    """Returns the dtype that autocast computes in on a device, ``bfloat16``; "" where it is off."""
    if not device_type or not torch.is_autocast_enabled(device_type):
        return ""
    return name_of(torch.get_autocast_dtype(device_type))


# ---- how many steps the training will take, where something in the process says so --------------

_MAX_EPOCHS = 256


class Goal:
    """The goal that a trainer has told, else the batches of the DataLoader's epoch."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._trainer_told = False
        self._iterator: Any = None
        """A weak reference to the iterator of the epoch under way."""
        self._is_over = True
        self._epochs = 0

    def tell(self, steps: int, steps_taken: int, by: str) -> None:
        """Writes that the trainer *by*, which has taken *steps_taken* steps, ends after *steps*."""
        if steps > 0:
            self._trainer_told = True
            self._write({"steps": steps, "before": steps_taken - self._context.step, "by": by})

    def batch_trained(self, iterator: Any) -> None:
        """Writes the length of an epoch at its first backward.

        A script that leaves an iterator before its end does not train whole epochs.
        """
        if self._trainer_told or self._epochs >= _MAX_EPOCHS:
            return
        if iterator is None or (self._iterator is not None and self._iterator() is iterator):
            return
        self._epochs = self._epochs + 1 if self._is_over else _MAX_EPOCHS
        self._iterator, self._is_over = weakref.ref(iterator), False
        batches = _epoch_batches(iterator)
        if batches and self._epochs < _MAX_EPOCHS:
            self._write({"batches": batches, "before": -self._context.step, "by": "DataLoader"})
        else:
            self._write({})

    def iterator_ended(self, iterator: Any) -> None:
        """Notes that an iterator has no more batches."""
        if self._iterator is not None and self._iterator() is iterator:
            self._is_over = True

    def _write(self, goal: GoalMetadata) -> None:
        self._context.add_metadata(goal=goal)


def _epoch_batches(iterator: Any) -> int:
    try:
        return len(iterator)
    except (TypeError, AttributeError, NotImplementedError):
        return 0  # an iterable data set has no length
