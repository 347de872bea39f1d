"""The end of what a process has written to its standard output, where that is a file."""

import os
import stat
from pathlib import Path

from zeromon.errors import SourceError
from zeromon.units import printable

MOST_BYTES = 64 << 10


def output_of(pid: int) -> tuple[str, tuple[str, ...]]:
    """Returns the file and the last lines of the standard output of *pid*, a process of this user here.

    Raises :class:`SourceError` where it is a terminal or a pipe, which keep nothing, or another user's.
    """
    link = Path(f"/proc/{pid}/fd/1")
    try:
        path = str(link.readlink())
        if not stat.S_ISREG(link.stat().st_mode):
            raise SourceError(
                f"the output of process {pid} goes to a {_kind(path)}, which keeps nothing",
                "It can be read where it goes to a file: torchrun ... > train.log, or Slurm's file.",
            )
        with link.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_BYTES))
            text = file.read(MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise SourceError(
            f"the output of process {pid} cannot be read: {error.strerror}"
        ) from error
    lines = text.splitlines()
    return printable(path), tuple(lines[1:] if size > MOST_BYTES else lines)


def _kind(path: str) -> str:
    if path.startswith("pipe:"):
        return "pipe"
    return "terminal" if path.startswith(("/dev/pts", "/dev/tty")) else "device"
