"""Writes an export: whole or not at all, readable by this user only, over a file only with force."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromon.base import can_rewrite_lines
from zeromon.base.errors import ExportError, os_errors_as
from zeromon.ring.files import replacing_file
from zeromon.ring.slices import RingEvents
from zeromon.snapshot import RunSnapshot

if TYPE_CHECKING:
    import polars as pl

_TELL_SECONDS = 0.2
_BAR = 20


@contextmanager
def replacement_file(path: Path, *, force: bool) -> Iterator[Path]:
    """Yields a private file to write; it becomes *path* when the block ends without an error.

    Raises :class:`ExportError` when the disk refuses, or when *path* exists and *force* is false.
    """
    if not force and path.exists():
        raise ExportError(f"{path} exists already", "Give another -o, or --force to replace it.")
    with os_errors_as(ExportError, f"write {path}"), replacing_file(path) as temporary:
        yield temporary


class Progress:
    """A progress bar on a terminal after *patience* seconds; nothing where stderr is no terminal."""

    def __init__(self, rows: int, unit: str = "rows", patience: float = _TELL_SECONDS) -> None:
        self.total, self._unit = rows, unit
        self._done = 0
        self._told = time.monotonic() + patience - _TELL_SECONDS
        self._shown = False

    def add(self, rows: int) -> None:
        """Counts *rows* as done (less than 0: undone), and redraws the line a few times a second."""
        self._done = max(0, self._done + rows)
        if time.monotonic() - self._told < _TELL_SECONDS or not can_rewrite_lines(sys.stderr):
            return
        self._told, self._shown = time.monotonic(), True
        share = self._done / max(1, self.total)
        bar = "#" * round(min(share, 1) * _BAR)
        sys.stderr.write(
            f"\r\x1b[Kzeromon: [{bar:<{_BAR}}] {self._done:,} of {self.total:,} {self._unit}"
        )
        sys.stderr.flush()

    def end(self) -> None:
        """Removes the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The contents of an export, and its destination."""

    run: RunSnapshot
    steps: Sequence[pl.LazyFrame]
    """The step history, in pieces that fit into memory each."""
    rings: Iterable[RingEvents]
    """The last events of each rank; can be read once."""
    path: Path
    """The file or folder to write."""
    force: bool
    """True if an existing export is replaced."""
    progress: Progress

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of the step history by the names of its columns, and counts them as done."""
        for frame in self.steps:
            for row in frame.collect().iter_rows(named=True):
                self.progress.add(1)
                yield row
