"""A monitor's declaration: a file in monitors/ with a `MONITOR`, and `Lines` where it asks for lines.

The files are read by the bench and, for their lines, by the job; so they import only the standard
library at their top. Answers are keyed by question (cases.json). What a monitor concludes is a plain
value; what it only shows, so that its user concludes, is :class:`Shown`.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent


class Shown(NamedTuple):
    """An answer that the monitor's user finds in what it shows."""

    value: Any


Answers = Mapping[str, Any]


class Run(NamedTuple):
    """A run that a monitor watches."""

    folder: Path
    program: Path
    arguments: tuple[str, ...]
    """Of the program: the case, and what else it takes."""
    bin: Path
    """Of the environment in which the monitors are installed."""
    case: Mapping[str, Any]
    """Of cases.json."""
    kind: str
    """``gloo`` or ``virtual``."""
    launcher: tuple[str, ...]
    """Starts two ranks; a program and its arguments follow."""
    variables: Mapping[str, str]
    """The environment of the ranks."""

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.arguments[0]

    @property
    def output(self) -> str:
        """What the run has printed."""
        return (self.folder / "output").read_text(errors="replace")

    @property
    def must_name(self) -> bool:
        """Whether the job never ends by itself: it ends once the monitor has named the fault."""
        return bool(self.case.get("endless"))

    def ranks(self, *program: str) -> list[str]:
        """The command that starts two ranks, by default of the job."""
        return [*self.launcher, *(program or (str(self.program), *self.arguments))]

    def pids(self) -> list[int]:
        """The processes of the ranks, by rank."""
        files = sorted(self.folder.glob("*.pid"), key=lambda path: int(path.stem))
        return [int(path.read_text()) for path in files]

    def read(self, *command: str, timeout: float = 60) -> str:
        """What a command of the monitors' environment prints."""
        words = [str(self.bin / command[0]), *command[1:]]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout, env=dict(self.variables)
        )
        return done.stdout + done.stderr


class Lines:
    """The lines that a monitor's own documentation asks for in a script; none of them by default."""

    def begin(self) -> None:
        """After the process group and before the model."""

    def each_step(self, model: Any) -> AbstractContextManager[Any]:
        """Around a step."""
        return nullcontext()

    def communicator(self) -> Any:
        """What the script calls for a collective."""
        import torch.distributed

        return torch.distributed

    def deepspeed_settings(self) -> dict[str, Any]:
        """Further settings in the configuration of DeepSpeed."""
        return {}

    def end(self) -> None:
        """After the last step."""


def _no_answers(run: Run) -> Answers:
    return {}


class Monitor(NamedTuple):
    """A monitor, in its best mode for these questions."""

    name: str
    package: str
    """Whose version is printed."""
    lines: int
    """That its user adds to the script: those of its class `Lines`."""
    answers: Mapping[str, Sequence[str]]
    """``gloo`` and ``virtual`` -> the cases in which it has something to answer, by its documentation;
    a ``*`` at the end of a name stands for the rest. Elsewhere it is n/a without a run."""
    launch: Callable[[Run], list[str]] = Run.ranks
    environment: Mapping[str, str] = {}
    """Of the ranks; ``{program}`` is the name of the job."""
    live: Callable[[Run], Answers] = _no_answers
    """While the ranks live; of a fault that it must name, asked again and again."""
    after: Callable[[Run], Answers] = _no_answers
    """After the end of the run."""
    installed: Sequence[str] = ()
    """What pip installs for it."""
    reason: Callable[[Run], str] | None = None
    """Tries to start it; the reason why it cannot answer here, or ""."""
    url: str = ""
    steps: tuple[int, int] | None = None
    """The first and the last step that its figures are of, where it chooses; from 0."""
    forks: bool = True
    """Whether ranks may be forked from a process with torch: it does not begin at their start."""


def load_monitor(name: str) -> ModuleType:
    """The module of a monitor, by the name of its file."""
    return importlib.import_module(f"monitors.{name}")


def monitor_files() -> list[str]:
    """The names of all monitors' files, zeromon first."""
    names = sorted(path.stem for path in (HERE / "monitors").glob("[a-z]*.py"))
    return sorted(names, key=lambda name: name != "zeromon")


def monitor_lines() -> Lines:
    """In a job: the lines of the monitor whose file MONITOR names."""
    name = os.environ.get("MONITOR", "")
    lines: Lines = getattr(load_monitor(name), "Lines", Lines)() if name else Lines()
    return lines
