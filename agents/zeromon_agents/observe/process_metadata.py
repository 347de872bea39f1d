"""Settings of this process, its work of torch.compile, its runs of W&B and MLflow. Reads only."""

import functools
import os
import platform
import re
import sys
import time
import weakref
from collections import Counter
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
    CompiledMetadata,
    GoalMetadata,
    ProcessMetadata,
    TrackersMetadata,
    url_without_secrets,
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
        # Behind the last parenthesis: the name of a program may have spaces and parentheses
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[_START_TICKS])
        # The start time is of CLOCK_BOOTTIME, which goes on while the machine is suspended
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
        # Not getattr(): the __getattr__ of a lazy module may import something
        version = getattr(sys.modules.get(name), "__dict__", {}).get("__version__")
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
    # pybind leaves no annotations: a docstring begins with the signature and its return type
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
        # The maximum ends it: a script that leaves an iterator early has no epochs to announce
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


# ---- the work of torch.compile in this process, by its own counters ------------------------------

_SHOWN, _LONGEST_REASON = 3, 160
_GROWTH = 1.25


class Compiled:
    """Tells when there is something new, less often the longer the process trains."""

    def __init__(self) -> None:
        self._frames = 0
        self._from_step = 0.0

    def news(self, step: int) -> CompiledMetadata | None:
        """Returns all that dynamo has counted, where it has compiled since the last time; else None.

        Call it on the training thread, where dynamo compiles.
        """
        # Not imported: torch._dynamo loads slowly, and nothing is compiled without it
        utils = sys.modules.get("torch._dynamo.utils")
        frames = 0 if utils is None else utils.counters.get("frames", {}).get("ok", 0)
        if utils is None or frames == self._frames or step < self._from_step:
            return None
        self._frames, self._from_step = frames, _GROWTH * step
        breaks = Counter(utils.counters.get("graph_break", {}))
        # absent from torch 2.6
        metrics: list[Any] = getattr(utils, "get_compilation_metrics", list)()
        recompiles = Counter(filter(None, (getattr(m, "recompile_reason", None) for m in metrics)))
        return {
            "frames": frames,
            "graph_breaks": breaks.total(),
            "recompiles": recompiles.total(),
            "break_reasons": _frequent_reasons(breaks.items()),
            "recompile_reasons": _frequent_reasons(recompiles.items()),
        }


def _frequent_reasons(counted: Iterable[tuple[str, int]]) -> list[str]:
    """The most frequent reasons: ``3 x s.n == 0``."""
    reasons: Counter[str] = Counter()
    for reason, count in counted:
        # The explanation of a break, or the guard without its cache entry (0/1:) and its values
        _, _, explained = reason.partition("Explanation: ")
        head = (explained or reason).partition("\n")[0].partition("  #")[0].partition(". expected ")[0]
        entry, _, guard = head.partition(": ")
        short_reason = (guard if entry.replace("/", "").isdigit() else head).strip()
        reasons[short_reason[:_LONGEST_REASON]] += count
    return [f"{count} x {reason}" for reason, count in reasons.most_common(_SHOWN)]


# ---- which run of W&B and of MLflow this process has open ----------------------------------------

_LONGEST_VALUE = 500
_WANDB = {
    "id": "run_id", "project": "project", "entity": "entity", "base_url": "base_url", "mode": "mode",
    "folder": "root_dir", "name": "run_name", "group": "run_group",
}  # fmt: skip
"""Name of a fact about a run of W&B -> the setting that has it."""
_SQLITE = "sqlite:///"


class Trackers:
    """Tells when the process has opened another run; the heartbeat asks, never the training thread."""

    def __init__(self) -> None:
        self._wandb: Any = None
        self._mlflow = ""
        self._failed = False

    def news(self) -> TrackersMetadata:
        """Returns the runs that were opened since the last call; empty without one.

        After an error it does not look again: a thousand errors would end the agent.
        """
        if self._failed:
            return {}
        self._failed = True
        opened_runs: TrackersMetadata = {}
        run = getattr(sys.modules.get("wandb"), "run", None)
        settings = getattr(run, "_settings", None)
        key = getattr(settings, "run_id", None)
        # wandb.init(mode="disabled") makes a run that has an id and is sent nowhere
        if key and key != self._wandb and getattr(settings, "mode", "") != "disabled":
            self._wandb = key
            facts = {name: _short_text(getattr(settings, of, "")) for name, of in _WANDB.items()}
            facts["folder"] = os.path.abspath(facts["folder"])
            facts["base_url"] = url_without_secrets(facts["base_url"])
            opened_runs["wandb"] = facts
        active = _mlflow_run()
        if active and active != self._mlflow:
            self._mlflow = active
            uri = _absolute_uri(_short_text(sys.modules["mlflow"].get_tracking_uri()))
            opened_runs["mlflow"] = {"run_id": active, "tracking_uri": url_without_secrets(uri)}
        self._failed = False
        return opened_runs


def _short_text(value: Any) -> str:
    return str(value or "")[:_LONGEST_VALUE]


def _mlflow_run() -> str:
    """The id of the run that any thread has open, "" without one; the stacks belong to threads."""
    stack = getattr(sys.modules.get("mlflow.tracking.fluent"), "_active_run_stack", None)
    if stack is None:
        return ""
    # Older versions of mlflow keep one list for all threads
    stacks = [stack] if isinstance(stack, list) else list(stack.get_all_thread_values().values())
    # a thread may end its run meanwhile
    return next((_short_text(run.info.run_id) for runs in stacks for run in runs[-1:]), "")


def _absolute_uri(uri: str) -> str:
    """*uri*, where it names a file or a folder its absolute path; ``databricks`` is a place, too."""
    if uri.startswith(_SQLITE):
        return _SQLITE + os.path.abspath(uri.removeprefix(_SQLITE))
    return os.path.abspath(uri) if os.path.isdir(uri) else uri
