"""The git commit of a run's script, read once and without waiting for git."""

import os
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from zeromon.ring.files import replace_file

REVISION = "revision.txt"
_SECONDS = 30.0
_COMMIT = re.compile(r"[0-9a-f]{40,64}(-dirty)?")
_DESCRIBE = (
    "git", "-c", "core.fsmonitor=false", "describe", "--always", "--abbrev=64", "--exclude=*", "--dirty",
)  # fmt: skip


class Revision:
    """The commit of the folder that :meth:`of` is called with first.

    It is kept in the folder of the run, because a collector that starts later would read a later commit.
    """

    def __init__(self, run_folder: Path) -> None:
        self._file = run_folder / REVISION
        self._git: subprocess.Popen[bytes] | None = None
        self._until = 0.0
        self._text: str | None = None
        with suppress(OSError, ValueError):
            self._text = _valid(self._file.read_text())

    def of(self, folder: str) -> str:
        """Returns ``COMMIT`` or ``COMMIT-dirty`` of *folder*; "" while unknown, and without git."""
        if self._text is None and folder:
            self._look(folder)
        return self._text or ""

    def _look(self, folder: str) -> None:
        if self._git is None:
            quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
            self._until = time.monotonic() + _SECONDS
            try:
                self._git = subprocess.Popen(
                    _DESCRIBE,
                    cwd=folder,
                    env=quiet,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except OSError:
                self._text = ""
        elif self._git.poll() is not None:
            assert self._git.stdout is not None
            with self._git.stdout as output:  # one line, which a pipe holds
                self._text = _valid(output.read().decode(errors="replace"))
            with suppress(OSError):
                replace_file(self._file, self._text)
        elif time.monotonic() > self._until:
            self._git.kill()


def _valid(text: str) -> str:
    return text.strip() if _COMMIT.fullmatch(text.strip()) else ""
