"""The formats that ``zeromon export`` writes. A new one is a function and a line in :data:`FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zeromon.export import chrome_trace, tables, trackers
from zeromon.export.files import Progress, replaced
from zeromon.ring.slices import RingEvents
from zeromon.snapshot import RunSnapshot

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is exported, and where to."""

    run: RunSnapshot
    steps: Sequence[pl.LazyFrame]
    """The step history, in pieces that fit into memory each."""
    rings: Iterable[RingEvents]
    """The last events of each rank; can be read once."""
    path: Path
    """The file or folder to write."""
    force: bool
    """Whether an existing export is replaced."""
    progress: Progress


class Format(NamedTuple):
    """One format: how its output is named, written and described."""

    suffix: str
    """What the default name of the output ends with."""
    write: Callable[[Export], str]
    """Writes the export; returns a note for the user, "" for none.

    Raises :class:`ExportError`, :class:`OSError` or :class:`polars.exceptions.PolarsError`.
    """
    description: str
    """What it is for, on one line of the help."""


def _parquet(export: Export) -> str:
    with replaced(export.path, force=export.force) as file:
        tables.write(export.run, export.steps, file, packed=True)
    return ""


def _csv(export: Export) -> str:
    with replaced(export.path, force=export.force) as file:
        tables.write(export.run, export.steps, file, packed=False)
    return ""


def _chrome_trace(export: Export) -> str:
    packed = export.path.suffix == ".gz"
    with replaced(export.path, force=export.force) as file:
        merged = chrome_trace.write(
            export.run, export.steps, export.rings, file, export.progress, packed=packed
        )
    return f"{merged:,} rows are of many steps each: counters, no slices" if merged else ""


def _tensorboard(export: Export) -> str:
    trackers.write_tensorboard(
        export.run, export.steps, export.path, export.progress, force=export.force
    )
    return ""


def _wandb(export: Export) -> str:
    trackers.write_wandb(export.run, export.steps, export.path, export.progress, force=export.force)
    return ""


FORMATS = {
    "parquet": Format(".parquet", _parquet, "a table, a row a rank and step"),
    "csv": Format(".csv", _csv, "the same for spreadsheets"),
    "chrome-trace": Format(".trace.json", _chrome_trace, "for ui.perfetto.dev"),
    "tensorboard": Format("-tensorboard", _tensorboard, "a run a rank; needs tensorboard"),
    "wandb": Format("-wandb", _wandb, "offline, for wandb sync; needs wandb"),
}
"""Name after ``--to`` -> format."""
