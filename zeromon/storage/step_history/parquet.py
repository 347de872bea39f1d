"""Closed segments of a step history: Parquet files, and how old ones are merged to save space.

polars reads and writes Parquet. Every function imports it by itself, so that importing this module
stays cheap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromon.ring.files import replacing_file
from zeromon.storage.step_history.rows import COLUMNS, NAMES, PEAKS, SCALARS, TIMES, Row, seg_files

if TYPE_CHECKING:
    import polars as pl

MERGED = 16
"""How many rows of a rank become one when a segment is merged."""
_MAX_MERGES = 2
_KEPT_WHOLE = 2
"""Newest closed segments that are merged last."""


def rows_frame(rows: Sequence[Row]) -> pl.DataFrame:
    """Returns *rows* as a table."""
    import polars as pl

    kinds: Mapping[str, Any] = {"I": pl.UInt32, "q": pl.Int64, "Q": pl.UInt64, "d": pl.Float64}
    schema = {name: kinds[code] for name, code in COLUMNS}
    return pl.DataFrame(rows, schema=schema, orient="row")


def write_parquet(content: pl.DataFrame, path: Path) -> None:
    """Replaces the segment *path* by the rows in *content*."""
    with replacing_file(path) as temporary:
        content.write_parquet(temporary, compression="zstd", statistics=True)


def damage_errors() -> tuple[type[BaseException], ...]:
    """Returns what polars raises for a damaged file; a panic of its own is no :class:`Exception`."""
    import polars as pl

    return pl.exceptions.PolarsError, pl.exceptions.PanicException


def read_parquet(path: Path) -> pl.DataFrame:
    """Reads a whole segment. The file is not mapped: a writer may replace it meanwhile."""
    import polars as pl

    return pl.read_parquet(path, memory_map=False).select(NAMES)


def merge_oldest(folder: Path, limit_bytes: int) -> None:
    """Merges the oldest segments until all together take at most *limit_bytes*.

    Each segment is merged twice at most. When none is left to merge, the oldest is deleted.
    """
    for _ in range(1000):
        paths = list(seg_files(folder).values())
        total = sum(path.stat().st_size for path in paths)
        parquets = [path for path in paths if path.suffix == ".parquet"]
        if total <= limit_bytes or not parquets:
            return
        older = parquets[:-_KEPT_WHOLE] or parquets[:1]
        levels = {path: _merges_so_far(path) for path in older}
        path = min(older, key=lambda p: (levels[p], p))
        if levels[path] >= _MAX_MERGES:
            older[0].unlink()
            continue
        try:
            content = merge_rows(read_parquet(path))
        except damage_errors():
            path.unlink()
            continue
        write_parquet(content, path)


def _merges_so_far(path: Path) -> int:
    """Returns how often a segment was merged: 0, 1 or 2; 0 for a damaged one."""
    import polars as pl

    max_steps = 1
    with suppress(*damage_errors()):
        max_steps = pl.scan_parquet(path).select(pl.col("steps").max()).collect().item() or 1
    return 0 if max_steps == 1 else 1 if max_steps <= MERGED else _MAX_MERGES


def merge_rows(content: pl.DataFrame) -> pl.DataFrame:
    """Merges every :data:`MERGED` rows of a rank: means of times weighted by steps, maxima of bytes.

    The mean of a scalar is that of the rows that have it.
    """
    import polars as pl

    kinds = content.collect_schema()

    def weighted_mean(name: str) -> pl.Expr:
        is_known, steps = pl.col(name) >= 0, pl.col("steps")
        total = (pl.col(name) * steps).filter(is_known).sum()
        mean_of_known = (total / steps.filter(is_known).sum()).fill_nan(-1)
        return mean_of_known.round().cast(kinds[name]).alias(name)

    return (
        content.sort("rank", "start_us")
        .with_columns((pl.int_range(pl.len()).over("rank") // MERGED).alias("part"))
        .group_by("rank", "part", maintain_order=True)
        .agg(
            pl.col("step").first(),
            pl.col("flags").max(),
            pl.col("start_us").first(),
            *map(weighted_mean, TIMES),
            pl.col("collectives").mean().round().cast(pl.UInt32),
            pl.col("micro_steps").max(),
            pl.col("collective_bytes").mean().round().cast(pl.Int64),
            *(pl.col(name).max() for name in PEAKS),
            *(pl.col(name).mean() for name in SCALARS),
            pl.col("steps").sum().cast(pl.UInt32).alias("steps"),
        )
        .select(NAMES)
    )
