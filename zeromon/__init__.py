"""zeromon: live OOM risk and exposed communication of ZeRO and FSDP training runs.

Importing this package loads the standard library only; every command loads what it needs.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def load(name: str | None = None) -> Any:
    """Returns the run *name* (id or path), as :class:`zeromon.cli.notebook.Run`; None: the newest."""
    return import_module("zeromon.cli.notebook").Run(name)


def compare(*runs: str) -> Any:
    """Returns *runs*, or repeats of one ``a,b,c``, as :class:`zeromon.cli.notebook.ComparedRuns`."""
    return import_module("zeromon.cli.notebook").ComparedRuns(*runs)
