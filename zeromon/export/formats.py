"""The formats that ``zeromon export`` writes. A new one is a function and a line in :data:`FORMATS`.

Tables have a row per rank and step; their columns carry units (docs/reference/columns.md). Unknown is
null, in CSV an empty cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from zeromon.base.units import formula_safe_cell
from zeromon.export import chrome_trace, trackers
from zeromon.export.files import Export, replacement_file
from zeromon.snapshot.step import IDLE, SKIPPED, UNTIMED
from zeromon.storage.step_history.rows import NAMES

if TYPE_CHECKING:
    import polars as pl


_KEYS = ("rank", "step", "steps")
_MAY_BE_UNKNOWN = (
    "communication_us", "allocated_bytes", "reserved_bytes", "rss_bytes", "other_bytes",
)  # fmt: skip


def export_table(export: Export) -> pl.LazyFrame:
    """Returns the step history with the exported columns."""
    import polars as pl

    run = export.run
    strategies = {rank.rank: formula_safe_cell(rank.strategy) for rank in run.ranks}
    flags = {"idle": IDLE, "skipped": SKIPPED, "untimed": UNTIMED}
    columns = [name for name in NAMES if name not in (*_KEYS, "flags")]
    return pl.concat(export.steps).select(
        pl.lit(formula_safe_cell(run.run)).alias("run"),
        pl.lit(formula_safe_cell(run.node)).alias("node"),
        pl.col("rank").replace_strict(strategies, default="", return_dtype=pl.String).alias("strategy"),
        *_KEYS,
        *((pl.col("flags") & bit).ne(0).alias(name) for name, bit in flags.items()),
        *(
            pl.when(pl.col(name) >= 0).then(pl.col(name)) if name in _MAY_BE_UNKNOWN else pl.col(name)
            for name in columns
        ),
    )


def write_parquet(export: Export) -> str:
    """Writes Parquet; raises polars's PolarsError or OSError."""
    with replacement_file(export.path, force=export.force) as file:
        export_table(export).sink_parquet(file, compression="zstd")
    return ""


def write_csv(export: Export) -> str:
    """Writes CSV; raises polars's PolarsError or OSError."""
    with replacement_file(export.path, force=export.force) as file:
        export_table(export).sink_csv(file)
    return ""


class Format(NamedTuple):
    """One format: how its output is named, written and described."""

    suffix: str
    """The ending of the output's default name."""
    write: Callable[[Export], str]
    """Writes the export; returns a note for the user, "" for none.

    Raises :class:`ExportError`, :class:`OSError` or :class:`polars.exceptions.PolarsError`.
    """
    description: str
    """The purpose of the format, on one line of the help."""


FORMATS = {
    "parquet": Format(".parquet", write_parquet, "a table, a row a rank and step"),
    "csv": Format(".csv", write_csv, "the same for spreadsheets"),
    "chrome-trace": Format(".trace.json", chrome_trace.write_trace, "for ui.perfetto.dev"),
    "tensorboard": Format("-tensorboard", trackers.write_tensorboard, "a run a rank; needs tensorboard"),
    "wandb": Format("-wandb", trackers.write_wandb, "offline, for wandb sync; needs wandb"),
}
"""Name after ``--to`` -> format."""
