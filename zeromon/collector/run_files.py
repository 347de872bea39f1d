"""The files of a run's folder: what a collector reads when it finds the run, and deletes at its end."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from zeromon.collector.cluster_client import NOTE
from zeromon.collector.notify import TOLD
from zeromon.fold import checkpoint
from zeromon.fold.checkpoint import Checkpoint
from zeromon.probes import process
from zeromon.probes.revision import REVISION
from zeromon.ring import paths, trials
from zeromon.ring.files import replace_file
from zeromon.ring.ring_file import remove_ring
from zeromon.ring.tokens import NAME as TOKEN
from zeromon.units import printable, printable_values

TOTALS, _HISTORY_END = "totals.msgpack", "history.json"
_RUN_FILES = (
    "rank*.ring", ".rank*.ring.*", "run.json", ".run.*", paths.RUN_NAME, f".{paths.RUN_NAME}.*",
    "nodes.json", NOTE,
    "meets", process.FILES, f".{process.FILES}.*", REVISION, f".{REVISION}.*", TOTALS, f".{TOTALS}.*",
    trials.REQUEST, trials.WORDS, "rank*.loading", paths.NOTIFY, f".{paths.NOTIFY}.*",
    TOLD, f".{TOLD}.*", _HISTORY_END, f".{_HISTORY_END}.*", TOKEN, f".{TOKEN}.*",
    f"{paths.TRACK}*", f".{paths.TRACK}*",
)  # fmt: skip
"""The files of zeromon in a run's folder."""


class HistoryEnd(NamedTuple):
    """Why the store keeps no history any more, "" while it does; since when, and the last step kept."""

    note: str = ""
    wall: float = 0.0
    step: int = 0


def read_history_end(folder: Path) -> HistoryEnd:
    """Returns what an earlier collector noted about the end of the history."""
    with suppress(OSError, ValueError, TypeError):
        note, wall, step = json.loads((folder / _HISTORY_END).read_text())
        return HistoryEnd(printable(str(note)), float(wall), int(step))
    return HistoryEnd()


def write_history_end(folder: Path, end: HistoryEnd) -> None:
    """Notes it beside the rings, because the store may be unable to keep it."""
    with suppress(OSError):
        replace_file(folder / _HISTORY_END, json.dumps(end))


def remove_files(folder: Path) -> None:
    """Deletes zeromon's own files alone, because the user may have chosen the folder."""
    for pattern in _RUN_FILES:
        for path in folder.glob(pattern):
            if path.suffix == ".ring":
                remove_ring(path)
            path.unlink(missing_ok=True)


def read_totals(path: Path) -> dict[str, Checkpoint]:
    """Returns the totals that an earlier collector saved, by the names of the rings."""
    try:
        return checkpoint.decode(path.read_bytes())
    except OSError:
        return {}


def started_of(folder: Path) -> float:
    """Returns when the run started according to an earlier collector; 0 without one."""
    with suppress(OSError, ValueError, TypeError):
        _, started = json.loads((folder / paths.RUN_NAME).read_text())
        return float(started)
    return 0.0


def clock_of(info: Mapping[str, Any]) -> int:
    """Returns wall clock less monotonic clock, ns, when the run began; now, where that is not known."""
    began, mono_ns, now_ns = info.get("started"), info.get("mono_ns"), time.monotonic_ns()
    if isinstance(began, float) and isinstance(mono_ns, int) and 0 < mono_ns <= now_ns:
        return round(began * 1e9) - mono_ns
    return time.time_ns() - now_ns


def read_facts(path: Path) -> dict[str, Any]:
    """Returns the JSON object in *path*; an empty one for anything else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return printable_values(content) if isinstance(content, dict) else {}
