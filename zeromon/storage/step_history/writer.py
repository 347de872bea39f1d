"""The one writer of a step history: appends rows to a log, turns full logs into Parquet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromon.base.errors import HistoryError, os_errors_as
from zeromon.ring import paths
from zeromon.ring.files import replacing_file
from zeromon.storage.step_history import rows as layout

if TYPE_CHECKING:
    import polars as pl

# ---- closed segments: Parquet files --------------------------------------------------------------

# polars reads and writes Parquet. Every function imports it by itself, so that importing this module
# stays cheap.

MERGED = 16
"""How many rows of a rank become one when a segment is merged."""
_MAX_MERGES = 2
_KEPT_WHOLE = 2
"""Newest closed segments that are merged last."""


def rows_frame(rows: Sequence[layout.Row]) -> pl.DataFrame:
    """Returns *rows* as a table."""
    import polars as pl

    kinds: Mapping[str, Any] = {"I": pl.UInt32, "q": pl.Int64, "Q": pl.UInt64, "d": pl.Float64}
    schema = {name: kinds[code] for name, code in layout.COLUMNS}
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

    return pl.read_parquet(path, memory_map=False).select(layout.NAMES)


def merge_oldest(folder: Path, limit_bytes: int) -> None:
    """Merges the oldest segments until all together take at most *limit_bytes*.

    Each segment is merged twice at most. When none is left to merge, the oldest is deleted.
    """
    # Bounded: a segment with one row a rank does not shrink, and would be merged for ever
    for _ in range(1000):
        paths = list(layout.seg_files(folder).values())
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
        # 0 / 0 where no row has the figure: -1 stands for unknown
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
            *map(weighted_mean, layout.TIMES),
            pl.col("collectives").mean().round().cast(pl.UInt32),
            pl.col("micro_steps").max(),
            pl.col("collective_bytes").mean().round().cast(pl.Int64),
            *(pl.col(name).max() for name in layout.PEAKS),
            *(pl.col(name).mean() for name in layout.SCALARS),
            pl.col("steps").sum().cast(pl.UInt32),
        )
        .select(layout.NAMES)
    )


# ---- the one writer of a step history ------------------------------------------------------------

SEGMENT_ROWS = 200_000
LIMIT_BYTES = 768 << 20


class Writer:
    """Appends to the history in *folder*. Every method raises :class:`HistoryError` on a disk error."""

    def __init__(
        self, folder: Path, *, segment_rows: int = SEGMENT_ROWS, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.folder = paths.make_private_folder(folder)
        self._segment_rows = segment_rows
        self._limit = limit_bytes
        self._fd = -1
        self._rows = 0
        self._last: dict[int, int] = {}
        """Rank -> start of its newest row."""
        self._number = 0
        with os_errors_as(HistoryError, f"write {folder}"):
            # Continues where an earlier writer ended; a record that it wrote in part is cut off.
            # A writer that is killed leaves the temporary file of its conversion
            for path in self.folder.glob(".*"):
                path.unlink(missing_ok=True)
            by_number = layout.seg_files(self.folder)
            self._number = max(by_number, default=0) or 1
            if by_number.get(self._number, Path()).suffix == ".parquet":
                self._number += 1
            for number, path in by_number.items():
                if path.suffix == ".log" and number != self._number:
                    self._to_parquet(path)  # its writer ended before it closed this log
            self._last = last_row_starts(self.folder)
            self._open_log()

    def _open_log(self) -> None:
        path = self.folder / f"{self._number:06}.log"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        # Rows of another layout cannot be continued: a reader would take their bytes for other columns
        if size < len(layout.MAGIC) or os.pread(self._fd, len(layout.MAGIC), 0) != layout.MAGIC:
            os.ftruncate(self._fd, 0)
            os.write(self._fd, layout.MAGIC)
            self._rows = 0
            return
        self._rows = sum(1 for _ in layout.read_log(path))
        os.ftruncate(self._fd, len(layout.MAGIC) + self._rows * layout.RECORD_SIZE)

    def append(self, rows: Iterable[layout.Row]) -> int:
        """Appends *rows* newer than their rank's newest; returns how many. They outlive this process."""
        newer = (row for row in rows if row[4] > self._last.get(row[0], -(1 << 62)))
        fresh = [(row, record) for row in newer if (record := layout.pack_row(row))]
        if not fresh:
            return 0
        blob = b"".join(record for _, record in fresh)
        with os_errors_as(HistoryError, f"write {self.folder}"):
            nbytes = os.write(self._fd, blob)
        if nbytes < len(blob):  # a full disk takes a part; readers skip it
            raise HistoryError(f"cannot write {self.folder}: no space left")
        for row, _ in fresh:
            self._last[row[0]] = max(row[4], self._last.get(row[0], row[4]))
        self._rows += len(fresh)
        if self._rows >= self._segment_rows:
            self.close_segment()
        return len(fresh)

    def close_segment(self) -> None:
        """Converts the log to Parquet, opens the next one, and merges segments above the size limit."""
        if not self._rows:
            return
        with os_errors_as(HistoryError, f"write {self.folder}"):
            self.close()
            self._to_parquet(self.folder / f"{self._number:06}.log")
            self._number += 1
            self._open_log()
            merge_oldest(self.folder, self._limit)

    def _to_parquet(self, log: Path) -> None:
        rows = list(layout.read_log(log))
        if rows:
            write_parquet(rows_frame(rows), log.with_suffix(".parquet"))
        # After the Parquet file is in place: a kill in between must lose no row
        log.unlink()

    def close(self) -> None:
        """Closes the log. It stays a log: readers take logs as they take Parquet."""
        if self._fd >= 0:
            # In this order: a second close() must not close a number that another file has got
            fd, self._fd = self._fd, -1
            os.close(fd)


def last_row_starts(folder: Path) -> dict[int, int]:
    """Returns rank -> start of its newest row, microseconds since the epoch."""
    starts: dict[int, int] = {}
    for path in layout.seg_files(folder).values():
        for rank, start in _row_starts(path):
            starts[rank] = max(start, starts.get(rank, start))
    return starts


def _row_starts(path: Path) -> Iterator[tuple[int, int]]:
    if path.suffix == ".log":
        yield from ((row[0], row[4]) for row in layout.read_log(path))
        return
    import polars as pl

    with suppress(*damage_errors()):
        starts = read_parquet(path).group_by("rank").agg(pl.col("start_us").max())
        yield from starts.iter_rows()
