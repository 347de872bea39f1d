"""A run for TensorBoard and for Weights & Biases: the scalars of each step and rank, and the ledger.

Both are used only when they are installed, and an export asks neither to reach a network. What a live
run gets (:mod:`zeromon.export.live_trackers`) has the same figures under the same names.
"""

import importlib
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from zeromon.errors import ExportError
from zeromon.export.files import Export
from zeromon.readout.breakdown import PHASES
from zeromon.readout.ledger import job_ledger
from zeromon.snapshot import RunSnapshot
from zeromon.storage.step_history import NOT_TIMED

_SCALARS = (
    ("time/step_seconds", "duration_us"),
    *((f"time/{phase}_seconds", f"{phase}_us") for phase in PHASES if phase != "other"),
    ("time/offload_wait_seconds", "offload_blocked_us"),
    ("communication/exposed_seconds", "exposed_us"),
    ("communication/seconds", "communication_us"),
    ("communication/payload_bytes", "collective_bytes"),
    ("memory/allocated_bytes", "allocated_bytes"),
    ("memory/reserved_bytes", "reserved_bytes"),
    ("memory/rss_bytes", "rss_bytes"),
)
"""Tag of a scalar and its column."""
_ONLY_TIMED = ("exposed_us", "communication_us")
_SUFFIX = ".zeromon"
MOST_RANKS = 64
"""Of more ranks a live tracker gets the largest and the median of each scalar."""

Row = dict[str, Any]
"""A row of the step history by the names of its columns."""


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """(tag, value) of a row, in seconds and bytes; what is unknown is left out."""
    untimed = row["flags"] & NOT_TIMED
    for tag, column in _SCALARS:
        value = row[column]
        if value < 0 or (untimed and column in _ONLY_TIMED):
            continue
        yield tag, value / 1e6 if column.endswith("_us") else value
    if row["duration_us"] and not untimed:
        yield "communication/exposed_share", row["exposed_us"] / row["duration_us"]


def ledger_scalars(run: RunSnapshot) -> dict[str, float]:
    """Goodput and the seconds of each cause, of all ranks and attempts up to now."""
    whole = job_ledger([run])
    found = {} if whole.goodput is None else {"ledger/goodput_share": whole.goodput}
    for row in whole.rows:
        tag = f"ledger/{row.cause}_seconds"
        found[tag] = found.get(tag, 0.0) + row.seconds
    return found


def needed(module: str, package: str) -> Any:
    """Imports *module*; raises :class:`ExportError` where *package* is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        text = f"that needs {package}, which is not installed"
        raise ExportError(text, f"pip install {package}") from error


# ---- TensorBoard -----------------------------------------------------------------------------------


class EventFiles:
    """An event file for each rank and one for the job, each in a folder: a run of TensorBoard.

    TensorBoard follows one file of a folder at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events = needed("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = needed("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._writing = needed("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writers: dict[str, Any] = {}

    def add_row(self, row: Row) -> None:
        """Adds the scalars of a step of a rank."""
        wall = (row["start_us"] + row["duration_us"]) / 1e6
        self.add(f"rank{row['rank']}", wall, row["step"], scalars(row))

    def add(self, name: str, wall: float, step: int, values: Iterable[tuple[str, float]]) -> None:
        """Adds *values* to the file in the folder *name*."""
        if name not in self._writers:
            where = str(self._folder / name)
            self._writers[name] = self._writing.EventFileWriter(where, filename_suffix=_SUFFIX)
        value = self._summaries.Summary.Value
        summary = self._summaries.Summary(value=[value(tag=t, simple_value=v) for t, v in values])
        self._writers[name].add_event(
            self._events.Event(wall_time=wall, step=step, summary=summary)
        )

    def flush(self) -> None:
        """Writes what was added."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Ends the files."""
        for writer in self._writers.values():
            writer.close()


def write_tensorboard(export: Export) -> str:
    """Writes the event files of a run."""
    run, folder = export.run, export.path
    files, step = EventFiles(folder), 0
    _make_room(export, f"rank*/events.*{_SUFFIX}", f"job/events.*{_SUFFIX}")
    try:
        for row in export.rows():
            files.add_row(row)
            step = max(step, row["step"])
        files.add("job", run.taken_wall, step, ledger_scalars(run).items())
    finally:
        files.close()
    return ""


def _make_room(export: Export, *patterns: str) -> None:
    """Removes the files of an earlier export with force, and nothing else."""
    ours = [path for pattern in patterns for path in export.path.glob(pattern)]
    if ours and not export.force:
        hint = "Give another -o, or --force to replace it."
        raise ExportError(f"{export.path} holds an export already", hint)
    for path in ours:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    export.path.mkdir(mode=0o700, parents=True, exist_ok=True)


# ---- Weights & Biases ------------------------------------------------------------------------------


def write_wandb(export: Export) -> str:
    """Writes an offline run for ``wandb sync``, with the step as x-axis and metrics by rank."""
    run = export.run
    wandb, name = needed("wandb", "wandb"), wandb_id(run.run)
    _make_room(export, f"wandb/offline-run-*-{name}")
    folder = str(export.path)
    board = open_wandb(run, id=name, name=run.run, project="zeromon", dir=folder, mode="offline")
    step = 0
    for step, rows in by_step(export.rows()):
        board.log({"step": step, **named(rows)})
    board.log({"step": step, **ledger_scalars(run)})
    board.finish()
    wandb.teardown()  # only then the last of it is in the file
    return ""


def open_wandb(run: RunSnapshot, settings: Row | None = None, **where: Any) -> Any:
    """Opens a run of W&B that has scalars alone over the step; *where*: as wandb.init has it."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no word of this to anybody
    wandb = needed("wandb", "wandb")
    first = run.ranks[0] if run.ranks else None
    board = wandb.init(
        config={
            "node": run.node,
            "strategy": first.strategy if first else "",
            "ranks": first.world_size if first else 0,
        },
        settings=wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            **settings or {},
        ),
        **where,
    )
    board.define_metric("step")
    board.define_metric("*", step_metric="step")
    return board


def wandb_id(run: str) -> str:
    """Returns an id that wandb accepts, unique for the run."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", run)[:64]
    return name if name == run else f"{name}-{zlib.crc32(run.encode()):08x}"


def live_steps(rows: Iterable[Row], ranks: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields the scalars of *rows* by step, of a run of so many *ranks*.

    Of many ranks the largest and the median of each.
    """
    ordered = sorted(rows, key=lambda row: (row["step"], row["rank"]))
    for step, together in by_step(ordered):
        yield step, named(together) if ranks <= MOST_RANKS else _reduced(together)


def by_step(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """Yields the rows of all ranks by step, in the order in which the steps began."""
    together: list[Row] = []
    seen = set[int]()
    for row in rows:
        if together and (row["step"] != together[0]["step"] or row["rank"] in seen):
            yield together[0]["step"], together
            together, seen = [], set()
        together.append(row)
        seen.add(row["rank"])
    if together:
        yield together[0]["step"], together


def named(rows: Iterable[Row]) -> dict[str, float]:
    """``rank0/time/step_seconds`` and the other scalars of *rows*, which are of different ranks."""
    return {f"rank{row['rank']}/{tag}": value for row in rows for tag, value in scalars(row)}


def _reduced(rows: Iterable[Row]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for tag, value in scalars(row):
            values.setdefault(tag, []).append(value)
    return {
        f"{name}/{tag}": of(found)
        for tag, found in values.items()
        for name, of in (("max", max), ("median", median))
    }
