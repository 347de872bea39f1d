"""Exports a run to TensorBoard and to Weights & Biases: the scalars of each step and rank.

Both are used only when they are installed, and neither is asked to reach a network.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromon.errors import ExportError
from zeromon.readout.breakdown import PHASES
from zeromon.snapshot import RunSnapshot
from zeromon.storage.step_history import NOT_TIMED

if TYPE_CHECKING:
    import polars as pl

    from zeromon.export.files import Progress

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


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(tag, value) of a row, in seconds and bytes; what is unknown is left out."""
    untimed = row["flags"] & NOT_TIMED
    for tag, column in _SCALARS:
        value = row[column]
        if value < 0 or (untimed and column in _ONLY_TIMED):
            continue
        yield tag, value / 1e6 if column.endswith("_us") else value
    if row["duration_us"] and not untimed:
        yield "communication/exposed_share", row["exposed_us"] / row["duration_us"]


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        text = f"that needs {package}, which is not installed"
        raise ExportError(text, f"pip install {package}") from error


# ---- TensorBoard -----------------------------------------------------------------------------------


def write_tensorboard(
    pieces: Sequence[pl.LazyFrame], folder: Path, progress: Progress, *, force: bool
) -> None:
    """Writes an event file for each rank, in a folder of its own, which TensorBoard shows as a run."""
    events = _needed("tensorboard.compat.proto.event_pb2", "tensorboard")
    summaries = _needed("tensorboard.compat.proto.summary_pb2", "tensorboard")
    writing = _needed("tensorboard.summary.writer.event_file_writer", "tensorboard")
    _make_room(folder, [*folder.glob(f"rank*/events.*{_SUFFIX}")], force=force)
    writers: dict[int, Any] = {}
    try:
        for piece in pieces:
            for row in piece.collect().iter_rows(named=True):
                progress.add(1)
                writer = writers.get(row["rank"])
                if writer is None:
                    name = str(folder / f"rank{row['rank']}")
                    writer = writing.EventFileWriter(name, filename_suffix=_SUFFIX)
                    writers[row["rank"]] = writer
                values = [
                    summaries.Summary.Value(tag=tag, simple_value=value)
                    for tag, value in scalars(row)
                ]
                writer.add_event(
                    events.Event(
                        wall_time=(row["start_us"] + row["duration_us"]) / 1e6,
                        step=row["step"],
                        summary=summaries.Summary(value=values),
                    )
                )
    finally:
        for writer in writers.values():
            writer.close()


def _make_room(folder: Path, ours: Sequence[Path], *, force: bool) -> None:
    """Removes the files of an earlier export with *force*, and nothing else."""
    if ours and not force:
        hint = "Give another -o, or --force to replace it."
        raise ExportError(f"{folder} holds an export already", hint)
    for path in ours:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


# ---- Weights & Biases ------------------------------------------------------------------------------


def write_wandb(
    run: RunSnapshot,
    pieces: Sequence[pl.LazyFrame],
    folder: Path,
    progress: Progress,
    *,
    force: bool,
) -> None:
    """Writes an offline run for ``wandb sync``, with the step as x-axis and metrics by rank."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no word of this to anybody
    wandb = _needed("wandb", "wandb")
    name = wandb_id(run.run)
    _make_room(folder, [*folder.glob(f"wandb/offline-run-*-{name}")], force=force)
    first = run.ranks[0] if run.ranks else None
    board = wandb.init(
        project="zeromon",
        id=name,
        name=run.run,
        dir=str(folder),
        mode="offline",
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
        ),
    )
    board.define_metric("step")
    board.define_metric("*", step_metric="step")
    for step, values in by_step(pieces, progress):
        board.log({"step": step, **values})
    board.finish()
    wandb.teardown()  # only then the last of it is in the file


def wandb_id(run: str) -> str:
    """Returns an id that wandb accepts, unique for the run."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", run)[:64]
    return name if name == run else f"{name}-{zlib.crc32(run.encode()):08x}"


def by_step(
    pieces: Sequence[pl.LazyFrame], progress: Progress
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields the scalars of all ranks by step, in the order in which the steps began."""
    step, values, seen = -1, dict[str, float](), set[int]()
    for piece in pieces:
        for row in piece.collect().iter_rows(named=True):
            progress.add(1)
            if seen and (row["step"] != step or row["rank"] in seen):
                yield step, values
                values, seen = {}, set()
            step = row["step"]
            seen.add(row["rank"])
            values |= {f"rank{row['rank']}/{tag}": value for tag, value in scalars(row)}
    if seen:
        yield step, values
