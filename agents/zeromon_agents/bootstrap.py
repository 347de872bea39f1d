"""What the start-up shim calls when ``torch.distributed.distributed_c10d`` has just been loaded.

Nothing starts here: a launcher, a data worker and a compiler process import torch, too. The agent
starts when the process becomes a rank (``init_process_group``), or, without process groups, when an
optimizer first steps.
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

import torch  # being imported right now: its parts are there when they are used

from zeromon_agents.guard import Guard
from zeromon_agents.imports import ImportWatch
from zeromon_agents.patches import Patches
from zeromon_agents.turns import outside_of

if TYPE_CHECKING:
    from zeromon_agents.agent import Agent, Joined


class Bootstrap:
    """Waits for the process to become a rank; at most one an interpreter."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self._c10d: ModuleType | None = None
        self._patches = Patches()
        self._optimizer_hooks: list[Any] = []
        self._watches_forks = False
        self._watch = ImportWatch()
        self._failed = False
        self._waits = False
        """Whether the first optimizer step may start the agent."""

    def install(self, c10d: ModuleType) -> None:
        """Hooks ``init_process_group`` of *c10d* and the first optimizer step."""
        if self._c10d is not None:
            return
        self._c10d = c10d
        self._waits = True
        original = self._patches.original(c10d, "init_process_group")

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.start_safely()
            return result

        for name in (c10d.__name__, "torch.distributed", "torch.distributed.device_mesh"):
            # the others take the name over from c10d: after this, or they have it already
            module = sys.modules.get(name)
            if module is not None and vars(module).get("init_process_group") is original:
                self._patches.set(module, "init_process_group", init_process_group)
        self._watch.when_imported("torch.optim.optimizer", self._watch_optimizers)

    def join(self, run_dir: Path, joined: Joined) -> Agent:
        """Starts the agent in a process that is running; called by a thread of its own.

        Raises what keeps it from starting; nothing is left behind then.
        """
        if self.agent is not None:
            return self.agent
        self.agent = start_agent(run_dir, joined)
        self._watch_forks()
        import torch.optim.optimizer as optimizers

        if not self._optimizer_hooks:  # a run that hangs within one gets them when it goes on
            act = functools.partial(self._watch_optimizers, optimizers)
            outside_of(optimizers.__file__ or "", act, self._is_joined)
        return self.agent

    def _is_joined(self) -> bool:
        return self.agent is not None

    def _watch_forks(self) -> None:
        """Once a process, for such a hook cannot be taken away."""
        if not self._watches_forks:
            self._watches_forks = True
            os.register_at_fork(after_in_child=self._in_forked_child)

    def _in_forked_child(self) -> None:
        if self.agent is not None:
            self.agent.in_forked_child()

    def _watch_optimizers(self, optimizer_module: ModuleType) -> None:
        """Registers torch's global hooks, once, for as long as we are here.

        torch iterates over these hooks while it calls them, so nothing may be added or removed from
        within one: the agent, which may start in the first of them, is called through these two.
        """
        if self._optimizer_hooks:
            return
        before = getattr(optimizer_module, "register_optimizer_step_pre_hook", None)
        after = getattr(optimizer_module, "register_optimizer_step_post_hook", None)
        if before is not None and after is not None:
            self._optimizer_hooks = [before(self._before_step), after(self._after_step)]

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

    def start_safely(self) -> None:
        """Starts the agent; if it cannot, the user is told once and training goes on."""
        if self.agent is not None or self._failed:
            return
        try:
            self.agent = start_agent(run_directory())
            self._watch_forks()
        except Guard.CAUGHT as error:
            self._failed = True
            hint = getattr(error, "hint", "")
            tell_failure(error, hint)

    def stop(self) -> list[str]:
        """Stops the agent and takes our own wrappers away."""
        kept: list[str] = []
        self._waits = False
        if self.agent is not None:
            kept = self.agent.stop()
            self.agent = None
        kept += self._patches.restore()
        if self._optimizer_hooks:
            import torch.optim.optimizer as optimizers

            file = optimizers.__file__ or ""
            if not outside_of(file, self._remove_hooks, self._is_left):
                kept.append("torch's global optimizer hooks")
        self._watch.close()
        self._c10d = None
        self._failed = False
        return kept

    def _is_left(self) -> bool:
        return self.agent is None

    def _remove_hooks(self) -> None:
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks.clear()


def _is_rank() -> bool:
    """Whether a process that steps an optimizer is a rank: by itself, or with a group made unseen."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True  # by an init_process_group that was imported before we came
    return "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1"


BOOTSTRAP = Bootstrap()


def install(c10d: ModuleType) -> None:
    """The shim's entry."""
    BOOTSTRAP.install(c10d)


def tell_failure(error: BaseException, hint: str = "") -> None:
    """Says on stderr, once a process, that this process is not watched."""
    text = f"zeromon: this process is not watched ({type(error).__name__}: {error})"
    with suppress(OSError):  # stderr may be closed
        os.write(2, f"{text}{'. ' + hint if hint else ''}\n".encode())


def start_agent(run_dir: Path, joined: Joined | None = None) -> Agent:
    """Makes and starts the agent of this process."""
    missing = missing_parts()
    if missing:
        raise RuntimeError(f"torch {torch.__version__} has no {', '.join(missing)}; use torch 2.6+")
    from zeromon_agents.agent import Agent, Place

    agent = Agent(run_dir, Place(), joined)
    try:
        agent.start()
    except Guard.CAUGHT:
        agent.stop()  # half-installed hooks must not stay
        raise
    return agent


def missing_parts() -> list[str]:
    """What this torch lacks that the agent cannot do without."""
    import torch.optim.optimizer as optimizer

    distributed = getattr(torch._C, "_distributed_c10d", None)
    group = getattr(distributed, "ProcessGroup", None)
    wanted = {
        "torch.distributed": distributed is not None,
        "ProcessGroup._get_sequence_number_for_group": hasattr(
            group, "_get_sequence_number_for_group"
        ),
        "Work": hasattr(distributed, "Work"),
        "register_optimizer_step_post_hook": hasattr(
            optimizer, "register_optimizer_step_post_hook"
        ),
    }
    return [name for name, there in wanted.items() if not there]


def run_directory() -> Path:
    """The folder of this run: given by ``zeromon run``, or found by what the ranks have in common."""
    from zeromon import paths

    given = os.environ.get("ZEROMON_RUN_DIR")
    if given:
        folder = paths.make_private(Path(given))
        describe_run(folder)  # on the nodes where no `zeromon run` was
        return folder
    root = paths.choose_root()
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "python"
    name = "".join(c if c.isalnum() else "_" for c in script)[:24].strip("_") or "python"
    key = "|".join(os.environ.get(part, "") for part in _SHARED_BY_RANKS)
    if not key.strip("|"):
        key = f"{os.getpid()}.{time.time_ns()}"
    base = f"{name}-{zlib.crc32(key.encode()):08x}"
    rank = os.environ.get("RANK", "0")
    for attempt in range(1, 1000):
        folder = root / (base if attempt == 1 else f"{base}-{attempt}")
        if not list(folder.glob(f"rank{rank}.*.ring")):
            break  # a folder where this rank has been is an earlier run's
    folder = paths.make_private(folder)
    describe_run(folder)
    return folder


_SHARED_BY_RANKS = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


def describe_run(folder: Path) -> None:
    """Writes ``run.json`` for a run that no launcher of ours described; the first rank wins."""
    try:
        fd = os.open(folder / "run.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as file:
        json.dump({"run": folder.name, "command": sys.argv[:50], "started": time.time()}, file)
