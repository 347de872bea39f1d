"""Where an export goes: whole or not at all, for this user alone, over nothing unless asked to."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeromon.errors import ExportError

_TELL_SECONDS = 0.2


@contextmanager
def replaced(path: Path, *, force: bool) -> Iterator[Path]:
    """A file to write to beside *path*, which takes its place when all went well."""
    if not force and path.exists():
        raise ExportError(f"{path} is there already", "Give another -o, or --force to replace it.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


class Progress:
    """A line on a terminal that says how far it is; nothing elsewhere."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._done = 0
        self._told = time.monotonic()
        self._shown = False

    def add(self, rows: int) -> None:
        """So many more are done."""
        self._done += rows
        if time.monotonic() - self._told < _TELL_SECONDS or not sys.stderr.isatty():
            return
        self._told, self._shown = time.monotonic(), True
        share = self._done / max(1, self._rows)
        sys.stderr.write(f"\r\x1b[Kzeromon: {self._done:,} of {self._rows:,} rows, {share:.0%}")
        sys.stderr.flush()

    def end(self) -> None:
        """Takes the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
