"""Writes the steps of a run for other tools; live runs up to now.

  zeromon export RUN --to parquet         a table, a row a rank and step: polars, pandas, DuckDB
  zeromon export RUN --to csv             the same for spreadsheets
  zeromon export RUN --to chrome-trace    for ui.perfetto.dev and chrome://tracing
  zeromon export RUN --to tensorboard     event files, a run a rank; needs tensorboard
  zeromon export RUN --to wandb           an offline run for wandb sync; needs wandb

RUN is a run id or its beginning, or a file that zeromon report --json has written. docs/export.md has
the columns with their units. Files are for you alone (mode 0600), and replace others only with --force.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zeromon import paths
from zeromon.cli.report import picture_of, recent
from zeromon.errors import ExportError
from zeromon.exports import boards, chrome, rings, table
from zeromon.exports.files import Progress, replaced
from zeromon.history import pieces
from zeromon.snapshot import RunSnapshot
from zeromon.store import Store
from zeromon.units import human_bytes, printable

if TYPE_CHECKING:
    import polars as pl

_NAMES = {
    "parquet": ".parquet", "csv": ".csv", "chrome-trace": ".trace.json",
    "wandb": "-wandb", "tensorboard": "-tensorboard",
}  # fmt: skip
"""Form -> what the name of the output ends with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon export RUN --to FORM [-o PATH] [--force]``"""
    parser.add_argument("run", metavar="RUN", help="run id or its beginning, or a file")
    parser.add_argument("--to", required=True, choices=tuple(_NAMES), help="the form")
    parser.add_argument(
        "-o", "--output", metavar="PATH",
        help="a file, for wandb and tensorboard a folder (default: named after the run); a "
        "chrome-trace that ends in .gz is packed",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace what is there")


def call(options: argparse.Namespace) -> int:
    """Finds the run, writes it, says where it is."""
    run, is_kept = picture_of(options.run)
    found, broken = pieces(Store().history(run.run)) if is_kept else ([], ())
    if not found:
        found = [recent(run).lazy()]
    rows = sum(_height(piece) for piece in found)
    if not rows:
        raise ExportError(f"{run.run} has no step yet", "It ended before its first one, or waits.")
    for name in broken:
        sys.stderr.write(f"zeromon: {name} of its history cannot be read and is left out\n")
    path = Path(options.output or f"{_stem(run)}{_NAMES[options.to]}")
    os.umask(0o077)  # also for what libraries write
    kept = rings.of_run(run.run, Store().folder(run.run)) if is_kept else ()
    write(run, found, kept, path, options, Progress(rows))
    size = f", {human_bytes(path.stat().st_size)}" if path.is_file() else ""
    sys.stderr.write(f"zeromon: wrote {printable(str(path))}: {rows:,} rows{size}\n")
    return 0


def _height(piece: pl.LazyFrame) -> int:
    import polars as pl

    return int(piece.select(pl.len()).collect().item())


def _stem(run: RunSnapshot) -> str:
    """The run's name, where that may name a file."""
    return run.run if paths.is_run_id(run.run) else "run"


def write(
    run: RunSnapshot,
    found: Sequence[pl.LazyFrame],
    kept: Iterable[rings.RingEvents],
    path: Path,
    options: argparse.Namespace,
    progress: Progress,
) -> None:
    """Writes *found*, and what the rings *kept*, as it is asked for; raises :class:`ExportError`."""
    import polars as pl

    try:
        if options.to == "tensorboard":
            boards.write_tensorboard(found, path, progress, force=options.force)
        elif options.to == "wandb":
            boards.write_wandb(run, found, path, progress, force=options.force)
        else:
            with replaced(path, force=options.force) as temporary:
                if options.to == "chrome-trace":
                    packed = path.suffix == ".gz"
                    merged = chrome.write(run, found, kept, temporary, progress, packed=packed)
                    _tell_merged(merged)
                else:
                    table.write(run, found, temporary, packed=options.to == "parquet")
    except pl.exceptions.PolarsError as error:
        text = f"the history of {run.run} cannot be read: {error}"
        raise ExportError(
            text, "Of a live run, try again: it is rewritten now and then."
        ) from error
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        progress.end()


def _tell_merged(rows: int) -> None:
    if rows:
        sys.stderr.write(f"zeromon: {rows:,} rows are of many steps each: counters, no slices\n")
