"""Moments that the user marks.

They are in the run's folder of the store where that is on this machine, so that they are there the next
time; else they are kept as long as the view is open.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from zeromon.tui.line import clean

_MOST_BYTES = 1 << 20
_MOST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment."""

    wall: float
    """Seconds since the epoch."""
    step: int
    text: str


class Marks:
    """The marks of one run. *folder*: that of the run in the store, where it is on this machine."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / "marks.jsonl" if folder is not None and folder.is_dir() else None
        self.all: list[Mark] = sorted(_read(self.path), key=lambda mark: mark.wall)

    def add(self, mark: Mark) -> bool:
        """Keeps *mark*; returns whether on disk."""
        mark = Mark(mark.wall, mark.step, clean(mark.text)[:_MOST_TEXT])
        self.all = sorted([*self.all, mark], key=lambda other: other.wall)
        if self.path is None:
            return False
        line = json.dumps(asdict(mark)) + "\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            descriptor = os.open(self.path, flags, 0o600)
        except OSError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(line)
        return True


def _read(path: Path | None) -> Iterator[Mark]:
    """The marks in a file; lines that are none are passed over."""
    if path is None:
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return
            content = file.read(_MOST_BYTES)
        for line in content.splitlines():
            with suppress(ValueError, KeyError, TypeError):
                found = json.loads(line)
                text = clean(str(found["text"]))[:_MOST_TEXT]
                yield Mark(float(found["wall"]), int(found["step"]), text)
