"""Starts the agent when this process becomes a rank.

The start-up shim calls :func:`install` when ``torch.distributed.distributed_c10d`` has just been loaded.
The agent does not start there, because launchers, data workers and compiler processes import torch, too.
It starts at ``init_process_group``, or at the first optimizer step of a process without process groups.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch  # its import is under way: the parts exist when they are used

from zeromon_agents.observe.loading import FETCHERS, watch_worker
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.guard import Guard, run_when_not_executing
from zeromon_agents.runtime.imports import ImportClock, ImportWatch

if TYPE_CHECKING:
    from zeromon_agents.runtime.agent import Agent, Attachment


class Bootstrap:
    """Waits until the process becomes a rank, and holds its agent. One per interpreter."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self._c10d: ModuleType | None = None
        self._patches = Patches()
        self._optimizer_hooks: list[Any] = []
        self._watches_forks = False
        self._watch, self._clock = ImportWatch(), ImportClock()
        self._torch_from_ns = 0
        self._failed = False
        self._worker: Any = None
        """The hooks of a DataLoader's worker that a rank has spawned."""
        self._waits = False
        """True if the first optimizer step may start the agent."""

    def install(self, c10d: ModuleType, torch_from_ns: int = 0) -> None:
        """Hooks ``init_process_group`` of *c10d* and the first optimizer step.

        *torch_from_ns*: when the import of torch began, which is under way; 0 where that is not known.
        """
        # The shim and a script's own `start()` may both come here: two wrappers would start the agent
        if self._c10d is not None:
            return
        self._c10d = c10d
        self._waits = True
        self._torch_from_ns = torch_from_ns
        self._clock.start("torch", torch_from_ns)
        original = self._patches.find_original(c10d, "init_process_group")

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            began_ns = time.monotonic_ns()
            # The agent starts after the call, as rank and world size are unknown before
            result = original(*args, **kwargs)
            self.start_safely(began_ns)
            return result

        for name in (c10d.__name__, "torch.distributed", "torch.distributed.device_mesh"):
            # these import the name from c10d, and may have done so already
            module = sys.modules.get(name)
            if module is not None and vars(module).get("init_process_group") is original:
                self._patches.set(module, "init_process_group", init_process_group)
        # Not imported here: the import of torch is under way, and torch.optim may not be complete
        self._watch.when_imported("torch.optim.optimizer", self._watch_optimizers)
        self._watch.when_imported(FETCHERS, self._watch_worker)

    def attach(self, run_dir: Path, attachment: Attachment) -> Agent:
        """Starts the agent in a process that is training already; called by a thread of its own.

        Raises what keeps the agent from starting; no hook stays installed then.
        """
        if self.agent is not None:
            return self.agent
        self.agent = start_agent(run_dir, attachment)
        self._watch_forks()
        import torch.optim.optimizer as optimizers

        if not self._optimizer_hooks:  # a run that hangs within an optimizer gets the hooks later
            act = functools.partial(self._watch_optimizers, optimizers)
            run_when_not_executing(optimizers.__file__ or "", act, lambda: self.agent is not None)
        return self.agent

    def _watch_forks(self) -> None:
        """Registers the fork hook once per process, because Python cannot unregister it."""
        if not self._watches_forks:
            self._watches_forks = True
            os.register_at_fork(after_in_child=self._in_forked_child)

    def _in_forked_child(self) -> None:
        if self.agent is not None:
            self.agent.in_forked_child()

    def _watch_worker(self, module: ModuleType) -> None:
        # Without it, an error would fail the import of a data worker, where no agent counts errors
        with suppress(Guard.CAUGHT):
            self._worker = watch_worker(module)

    def _watch_optimizers(self, optimizer_module: ModuleType) -> None:
        """Registers torch's global optimizer hooks once, until :meth:`stop`.

        torch iterates over these hooks while it calls them, so no hook may be added or removed from
        within one. The agent may start in the first call, so it is called through these two hooks.
        """
        if self._optimizer_hooks:
            return
        # A torch without these functions is reported by `missing_parts` when the agent starts
        add_pre_hook = getattr(optimizer_module, "register_optimizer_step_pre_hook", None)
        add_post_hook = getattr(optimizer_module, "register_optimizer_step_post_hook", None)
        if add_pre_hook is not None and add_post_hook is not None:
            self._optimizer_hooks = [add_pre_hook(self._before_step), add_post_hook(self._after_step)]

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.agent is None and self._waits and not self._failed and _is_rank():
            self.start_safely()
        if self.agent is not None:
            self.agent.steps.optimizer_begins(optimizer)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self.agent is not None:
            self.agent.steps.optimizer_ends(optimizer)

    def start_safely(self, joined_from_ns: int = 0) -> None:
        """Starts the agent. A failure is reported once on stderr, and training goes on.

        *joined_from_ns*: when the script called ``init_process_group``, which has returned; 0: never.
        """
        # Without `_failed`, each optimizer step would try again and print the same failure
        if self.agent is not None or self._failed:
            return
        joined_ns = time.monotonic_ns()
        self._clock.stop()
        if self._worker is not None:  # what a launcher has spawned is a rank itself
            self._worker.close()
        try:
            self.agent = start_in_run()
            self._watch_forks()
            durations = self._set_up(joined_from_ns or joined_ns, joined_ns)
            self.agent.context.add_metadata(set_up=durations)
        except Guard.CAUGHT as error:
            self._failed = True
            hint = getattr(error, "hint", "")
            message = f"zeromon: this process is not watched ({type(error).__name__}: {error})"
            with suppress(OSError):  # stderr may be closed
                os.write(2, f"{message}{'. ' + hint if hint else ''}\n".encode())

    def _set_up(self, joined_from_ns: int, joined_ns: int) -> dict[str, int]:
        """Returns the nanoseconds of each known part of the set-up until now."""
        # Imported by ranks alone: launchers and data workers load this module, too
        from zeromon.ring.codes import SetUp
        from zeromon_agents.observe.process_metadata import process_start_ns

        durations = {
            SetUp.PROCESS_GROUPS: joined_ns - joined_from_ns,
            SetUp.AGENT: time.monotonic_ns() - joined_ns,
        }
        if self._torch_from_ns:
            durations[SetUp.LAUNCH] = self._torch_from_ns - process_start_ns()
            durations[SetUp.IMPORTS] = self._clock.spent_ns(joined_from_ns, joined_ns)
        return {str(stage): ns for stage, ns in durations.items() if ns > 0}

    def stop(self) -> list[str]:
        """Stops the agent and removes the bootstrap's own wrappers; returns names that stay patched."""
        kept_names: list[str] = []
        # First: an optimizer step of the training thread could start another agent meanwhile
        self._waits = False
        if self.agent is not None:
            kept_names = self.agent.stop()
            self.agent = None
        kept_names += self._patches.restore()
        if self._optimizer_hooks:
            import torch.optim.optimizer as optimizers

            file = optimizers.__file__ or ""
            if not run_when_not_executing(file, self._remove_hooks, lambda: self.agent is None):
                kept_names.append("torch's global optimizer hooks")
        self._watch.close()
        self._clock.stop()
        # Without these two, `install` and `start_safely` refuse to start the agent again
        self._c10d = None
        self._failed = False
        return kept_names

    def _remove_hooks(self) -> None:
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks.clear()


def _is_rank() -> bool:
    """Returns whether a process that steps an optimizer is a rank: alone, or one of a process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True  # through an init_process_group that was imported before it was patched
    return "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1"


BOOTSTRAP = Bootstrap()


def install(c10d: ModuleType, torch_from_ns: int = 0) -> None:
    """Installs the bootstrap; called by the start-up shim."""
    BOOTSTRAP.install(c10d, torch_from_ns)


def check_torch() -> None:
    """Raises RuntimeError where torch lacks a part. The agent needs some of them at its very import."""
    missing = missing_parts()
    if missing:
        raise RuntimeError(f"torch {torch.__version__} has no {', '.join(missing)}; use torch 2.6+")


def start_agent(run_dir: Path, attachment: Attachment | None = None) -> Agent:
    """Creates and starts the agent of this process."""
    from zeromon_agents.runtime.agent import Agent
    from zeromon_agents.runtime.rendezvous import RankInfo

    agent = Agent(run_dir, RankInfo(), attachment)
    try:
        agent.start()
    except Guard.CAUGHT:
        agent.stop()  # half-installed hooks must not stay
        raise
    return agent


def start_in_run() -> Agent:
    """Creates and starts the agent in the folder of this run.

    A collector may remove the folder of a run that has ended between two calls here: it is made again.
    """
    check_torch()
    import zeromon_agents.runtime.agent  # noqa: F401  # takes long, so before the folder is made
    from zeromon.base.errors import RingError

    for _ in range(_MAX_REMOVALS):
        folder = run_directory()
        try:
            return start_agent(folder)
        except RingError:
            if folder.exists():
                raise
    return start_agent(run_directory())


_MAX_REMOVALS = 2


def missing_parts() -> list[str]:
    """Returns the names that the agent needs and this torch lacks."""
    import torch.optim.optimizer as optimizer

    distributed = getattr(torch._C, "_distributed_c10d", None)
    group = getattr(distributed, "ProcessGroup", None)
    number, step_hook = "_get_sequence_number_for_group", "register_optimizer_step_post_hook"
    presence = {
        "torch.distributed": distributed is not None,
        f"ProcessGroup.{number}": hasattr(group, number),
        "Work": hasattr(distributed, "Work"),
        step_hook: hasattr(optimizer, step_hook),
    }
    return [name for name, is_present in presence.items() if not is_present]


def run_directory() -> Path:
    """Returns the folder of this run: given by ``zeromon run``, or named by what all ranks share."""
    from zeromon.ring import paths

    given_path = os.environ.get("ZEROMON_RUN_DIR")
    if given_path:
        folder = paths.make_private_folder(Path(given_path))
        describe_run(folder)  # on the nodes without a `zeromon run`
        return folder
    root = paths.choose_ring_root()
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "python"
    name = "".join(c if c.isalnum() else "_" for c in script)[:24].strip("_") or "python"
    key = "|".join(os.environ.get(variable, "") for variable in _SHARED_BY_RANKS)
    # Without a launcher all processes have the same empty key, and would share a folder
    if not key.strip("|"):
        key = f"{os.getpid()}.{time.time_ns()}"
    base = f"{name}-{zlib.crc32(key.encode()):08x}"
    rank = os.environ.get("RANK", "0")
    for attempt in range(1, 1000):
        folder = root / (base if attempt == 1 else f"{base}-{attempt}")
        if not list(folder.glob(f"rank{rank}.*.ring")):
            break  # a folder with a ring of this rank belongs to an earlier run
    folder = paths.make_private_folder(folder)
    describe_run(folder)
    return folder


_SHARED_BY_RANKS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def describe_run(folder: Path) -> None:
    """Writes ``run.json`` for a run without ``zeromon run``; the first rank to write wins."""
    try:
        fd = os.open(folder / "run.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as file:
        start_times = {"started": time.time(), "mono_ns": time.monotonic_ns()}
        json.dump({"run": folder.name, "command": sys.argv[:50], **start_times}, file)
