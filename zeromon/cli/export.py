"""Writes the steps of a run for other tools; of a live run the steps so far.

{formats}

RUN is a run id or its beginning, a file of zeromon report --json, or the folder of a record.
docs/reference/columns.md has the columns with their units. The files are readable by you only (mode
0600). Existing files are replaced only with --force.
"""

import argparse
import os
from pathlib import Path

from zeromon.base.errors import ExportError
from zeromon.base.units import human_bytes, printable
from zeromon.cli import tell_user
from zeromon.cli.parser import add_flag, add_option
from zeromon.cli.report import snapshot_of, step_tables
from zeromon.export.files import Export, Progress
from zeromon.export.formats import FORMATS
from zeromon.ring import paths, slices
from zeromon.snapshot import RunSnapshot
from zeromon.storage.step_history.writer import damage_errors

__doc__ = (__doc__ or "").format(
    formats="\n".join(
        f"  zeromon export RUN --to {name:<13} {fmt.description}" for name, fmt in FORMATS.items()
    )
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon export RUN --to FORMAT [-o PATH] [--force]``"""
    parser.add_argument("run", metavar="RUN", help="run id or its beginning, or a file")
    parser.add_argument("--to", required=True, choices=tuple(FORMATS), help="the format")
    add_option(
        parser, "-o --output", "PATH",
        "a file, for wandb and tensorboard a folder (default: named after the run); a "
        "chrome-trace that ends in .gz is compressed",
    )  # fmt: skip
    add_flag(parser, "--force", "replace an existing export")


def call(options: argparse.Namespace) -> int:
    """Writes the run that the user named; returns the exit code."""
    run, folder = snapshot_of(options.run)
    stem = run.run if paths.is_run_id(run.run) else "run"  # other names may not name a file
    path = Path(options.output or f"{stem}{FORMATS[options.to].suffix}")
    os.umask(0o077)  # also for the files that libraries write
    export = make_export(run, path, folder, force=options.force)
    note = write_export(options.to, export)
    if note:
        tell_user(note)
    size = f", {human_bytes(path.stat().st_size)}" if path.is_file() else ""
    tell_user(f"wrote {printable(str(path))}: {export.progress.total:,} rows{size}")
    return 0


def make_export(run: RunSnapshot, path: Path, folder: Path | None, *, force: bool = False) -> Export:
    """The export of *run* by *folder*, else its snapshot; raises :class:`ExportError` without steps."""
    import polars as pl

    steps, broken = step_tables(run, folder)
    rows = sum(frame.select(pl.len()).collect().item() for frame in steps)
    if not rows:
        raise ExportError(f"{run.run} has no step yet", "It ended before its first step, or waits.")
    for name in broken:
        tell_user(f"segment {name} of the history cannot be read and is left out")
    rings = slices.run_events(run.run, folder) if folder is not None else ()
    return Export(run=run, steps=steps, rings=rings, path=path, force=force, progress=Progress(rows))


def write_export(format: str, export: Export) -> str:
    """Writes *export* in a format of :data:`FORMATS`; returns the note of the format, "" for none.

    Raises :class:`ExportError` for whatever the disk, polars or the format refuses.
    """
    try:
        return FORMATS[format].write(export)
    except damage_errors() as error:
        message = f"the history of {export.run.run} cannot be read: {error}"
        hint = "The history of a live run is rewritten now and then: try again."
        raise ExportError(message, hint) from error
    except OSError as error:
        raise ExportError(f"cannot write {export.path}: {error.strerror or error}") from error
    finally:
        export.progress.end()
