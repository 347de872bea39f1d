"""Every error that zeromon raises on purpose, each with a way out.

::

    ZeromonError
      RingError            a ring file that cannot be made or read
        RingVersionError   written by another version of the layout
      RunNotFound          no run, or no such run
      RunAmbiguous         several runs, and no way to choose
      SourceError          a collector that does not answer
      CollectorError       the collector cannot start
      LaunchError          the command cannot be started
      PlanError            a model, a configuration or a plan that makes no sense
      TraceError           a file that is no trace
      CaptureRefused       a trace that cannot be taken now
      HistoryError         the history of a run cannot be written
      RuleNotFound         no rule of that code or name
      CheckError           a file that zeromon check cannot look at
      CompareError         runs that cannot be compared, or a limit that cannot be judged
      ExportError          a run that cannot be exported so, or not to there
      AttachRefused        a process that cannot be joined, or not be left
"""

from __future__ import annotations


class ZeromonError(Exception):
    """An error whose text is for the user. ``hint`` says what to try next."""

    hint = ""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = hint


class RingError(ZeromonError):
    """A ring file cannot be created or read."""

    hint = "Free space in the ring directory, or point ZEROMON_DIR at another one."


class RingVersionError(RingError):
    """The ring was written by another version of the layout."""

    hint = "Use the zeromon version that the training processes use."


class RunNotFound(ZeromonError):
    """There is no run, or none of that name."""

    hint = "Start one with: zeromon run -- torchrun --nproc-per-node 2 train.py"


class RunAmbiguous(ZeromonError):
    """Several runs match."""

    hint = "Name one of them."


class SourceError(ZeromonError):
    """A collector does not answer, or not as expected."""

    hint = "Check the address; `zeromon attach` without arguments lists the runs of this node."


class CollectorError(ZeromonError):
    """The collector cannot start."""

    hint = "Choose another port with --port or ZEROMON_PORT."


class LaunchError(ZeromonError):
    """The command cannot be started."""

    hint = "Give the command after two dashes: zeromon run -- torchrun train.py"


class PlanError(ZeromonError):
    """A model, a configuration or a plan that cannot be, or that cannot be read."""

    hint = "zeromon plan --help shows what can be given."


class TraceError(ZeromonError):
    """A trace that cannot be read, or that is none."""

    hint = (
        "zeromon trace analyze takes Kineto traces: .json or .json.gz, as torch.profiler exports."
    )


class CaptureRefused(ZeromonError):
    """A trace of a live run that cannot be taken, or not now."""

    hint = "zeromon trace capture --help says what can be asked for."


class HistoryError(ZeromonError):
    """The history of a run cannot be written: it stops, and the run goes on."""

    hint = "Free space where ZEROMON_STORE points, or point it somewhere else."


class RuleNotFound(ZeromonError):
    """There is no such rule."""

    hint = "zeromon rule lists them all."


class CheckError(ZeromonError):
    """A path that cannot be checked, or options that make no sense together."""

    hint = "zeromon check --help says what can be given."


class CompareError(ZeromonError):
    """Runs that cannot be compared, a limit that says nothing, or one that cannot be judged."""

    hint = "zeromon compare --help lists what limits can be set on."


class ExportError(ZeromonError):
    """A run that cannot be exported in that form, or not to that place."""

    hint = "zeromon export --help says what can be given."


class AttachRefused(ZeromonError):
    """A process that cannot be joined or left. It goes on as if nothing had been asked."""

    hint = "zeromon attach --help says what it needs."
