"""The formats that ``zeromon export`` writes. A new one is a function and a line in :data:`FORMATS`."""

from collections.abc import Callable
from typing import NamedTuple

from zeromon.export import chrome_trace, tables, trackers
from zeromon.export.files import Export


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


FORMATS = {
    "parquet": Format(".parquet", tables.write_parquet, "a table, a row a rank and step"),
    "csv": Format(".csv", tables.write_csv, "the same for spreadsheets"),
    "chrome-trace": Format(".trace.json", chrome_trace.write, "for ui.perfetto.dev"),
    "tensorboard": Format(
        "-tensorboard", trackers.write_tensorboard, "a run a rank; needs tensorboard"
    ),
    "wandb": Format("-wandb", trackers.write_wandb, "offline, for wandb sync; needs wandb"),
}
"""Name after ``--to`` -> format."""
