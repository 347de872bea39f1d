"""Tasks of a launcher that starts one ``zeromon run`` per rank, by their files in the run's folder."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from zeromon.probes.process import ProcessWatch
from zeromon.ring.files import replace_file

FILES = "task.*.json"


def announce(folder: Path) -> bool:
    """Writes the file of this process, which becomes the task; returns whether it is the first alive."""
    began = time.monotonic_ns()
    facts = {"pid": os.getpid(), "mono_ns": began}
    replace_file(folder / f"task.{os.getpid()}.json", json.dumps(facts))
    others = (known for path in folder.glob(FILES) if (known := _read(path)) is not None)
    return not any(
        born < began and ProcessWatch(pid, born).alive() for pid, born in others
    )  # the file of this process is not older than itself


def withdraw(folder: Path) -> None:
    """Removes the file of this process."""
    (folder / f"task.{os.getpid()}.json").unlink(missing_ok=True)


class TaskWatch:
    """The tasks whose files are in *folder*, now or since they were seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, ProcessWatch | None] = {}
        """Name of a file -> its process; None once that has ended."""

    @property
    def count(self) -> int:
        """How many tasks have been seen, alive or not."""
        return len(self._known)

    def alive(self) -> bool:
        """Whether a task lives; looks for new ones first."""
        for path in self._folder.glob(FILES):
            if path.name not in self._known and (found := _read(path)) is not None:
                self._known[path.name] = ProcessWatch(*found)
        for name, process in self._known.items():
            if process is not None and not process.alive():
                self._known[name] = None
        return any(process is not None for process in self._known.values())


def _read(path: Path) -> tuple[int, int] | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads(path.read_text())
        return int(facts["pid"]), int(facts["mono_ns"])
    return None
