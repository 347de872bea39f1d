"""Moments that the user marked.

They are in the run's folder of the store where that is on this machine, so that they are there the next
time; else they are kept as long as the view is open.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from zeromon.errors import ZeromonError
from zeromon.storage.run_store import writing
from zeromon.tui.line import clean

_MOST_BYTES = 1 << 20
_MOST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Mark:
    """One marked moment."""

    wall: float
    """Seconds since the epoch."""
    step: int
    text: str


_MARK = msgspec.json.Decoder(Mark)


class Marks:
    """The marks of one run. *folder*: the run's folder in the store; None for a run elsewhere."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / "marks.jsonl" if folder is not None and folder.is_dir() else None
        self.all: list[Mark] = sorted(_read(self.path), key=lambda mark: mark.wall)

    def add(self, mark: Mark) -> bool:
        """Adds *mark*; returns whether it was written to disk."""
        mark = Mark(mark.wall, mark.step, clean(mark.text)[:_MOST_TEXT])
        self.all = sorted([*self.all, mark], key=lambda other: other.wall)
        if self.path is None:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            with writing(self.path.parent) as folder:
                descriptor = os.open(folder / self.path.name, flags, 0o600)
        except (OSError, ZeromonError):
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(mark) + b"\n")
        return True


def _read(path: Path | None) -> Iterator[Mark]:
    """The marks in a file; skips lines that are no mark."""
    if path is None:
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return
            content = file.read(_MOST_BYTES)
        for line in content.splitlines():
            with suppress(ValueError, RecursionError):
                mark = _MARK.decode(line)
                yield replace(mark, text=clean(mark.text)[:_MOST_TEXT])
