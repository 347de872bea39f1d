"""Every error that zeromon raises on purpose, each with a hint."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ZeromonError(Exception):
    """An error with a text for the user. ``hint`` is what the user can try next."""

    hint = ""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = hint
        if self.hint and sys.version_info >= (3, 11):
            self.add_note(self.hint)  # Python users see the traceback, and no line of tell_user

    @property
    def told(self) -> str:
        """The text with the hint behind it."""
        return f"{self}. {self.hint}" if self.hint else str(self)


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


class RunRefused(ZeromonError):
    """The record of a run cannot be renamed, deleted or written on."""

    hint = "Run `zeromon runs --help` for usage."


class SourceError(ZeromonError):
    """A collector or a Prometheus does not answer, or answers something unexpected."""

    hint = "Check the address; `zeromon attach` without arguments lists the runs of this node."


class SourceRefused(SourceError):
    """A collector wants a token, or another one."""


class CollectorError(ZeromonError):
    """The collector cannot start."""

    hint = "Choose another port with --port or ZEROMON_PORT."


class LaunchError(ZeromonError):
    """The command cannot be started."""

    hint = "Give the command after two dashes: zeromon run -- torchrun train.py"


class PlanError(ZeromonError):
    """A model, a configuration or a plan that is invalid or cannot be read."""

    hint = "Run `zeromon plan --help` for usage."


class TraceError(ZeromonError):
    """A file that cannot be read as a trace."""

    hint = "zeromon trace --help has an example for each kind of file."


class CaptureRefused(ZeromonError):
    """A trace of a live run cannot be taken now."""

    hint = "zeromon trace capture --help describes the options."


class TrialRefused(ZeromonError):
    """A change cannot be tried in the live ranks now."""

    hint = "zeromon try --help says what can be tried."


class HistoryError(ZeromonError):
    """The history of a run cannot be written any more; the run continues without it."""

    hint = "Free space in the folder of ZEROMON_STORE, or set ZEROMON_STORE to another folder."


class RuleNotFound(ZeromonError):
    """There is no such rule."""

    hint = "zeromon rule lists all rules."


class CheckError(ZeromonError):
    """A path that cannot be checked, or options that exclude each other."""

    hint = "Run `zeromon check --help` for usage."


class CompareError(ZeromonError):
    """Runs that cannot be compared, an invalid threshold, or one that cannot be evaluated."""

    hint = "zeromon compare --help lists the figures that take a threshold."


class ExportError(ZeromonError):
    """A run that cannot be exported in that format or to that path."""

    hint = "Run `zeromon export --help` for usage."


class NotifyError(ZeromonError):
    """A URL that names no service, or no apprise to send with."""

    hint = (
        "docs/how-to/alerts.md has the URL of each service: slack://..., mailtos://..., json://HOST/PATH"
    )


class AttachRefused(ZeromonError):
    """zeromon cannot attach to a process or detach from it. The process continues unchanged."""

    hint = "zeromon attach --help lists the requirements."


@contextmanager
def os_errors_as(kind: type[ZeromonError], action: str, hint: str | None = None) -> Iterator[None]:
    """Raises *kind*, ``cannot ACTION: reason``, in place of an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot {action}: {error.strerror or error}", hint) from error


_TOOLS = {"uv-receipt.toml": "uv tool install", "pipx_metadata.json": "pipx install --force"}
"""The file by which a tool's environment is known, and the command that makes one."""


def package_install_hint(extra: str) -> str:
    """How to install *extra* where this zeromon is, and not where a ``pip`` of the path would."""
    commands = (command for file, command in _TOOLS.items() if Path(sys.prefix, file).is_file())
    return f"{next(commands, 'pip install')} 'zeromon[{extra}]'"
