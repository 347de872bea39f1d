"""zeromon: live OOM risk and exposed communication of ZeRO and FSDP training runs.

Importing this package loads the standard library only; every command loads what it needs.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def load(name: str | None = None) -> Any:
    """Returns the run *name*, live or recorded, as :class:`zeromon.cli.notebook.Run`.

    *name*: a run id or its beginning, a file of ``zeromon report --json``, or the folder of a record;
    None is the newest run.
    """
    return import_module("zeromon.cli.notebook").Run(name)


def compare(*runs: str) -> Any:
    """Returns *runs* side by side, as :class:`zeromon.cli.notebook.ComparedRuns`.

    Each is a name as :func:`load` takes it, or repeats of one program: ``a,b,c``.
    """
    return import_module("zeromon.cli.notebook").ComparedRuns(*runs)
