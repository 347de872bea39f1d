"""Queries over a step history: a series for a chart, the last steps, ranges of steps.

A segment that cannot be read is left out. polars is imported by the functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromon.snapshot.step import NOT_TIMED, StepRange
from zeromon.storage.run_store import WHOLE_RUN, StepQuery
from zeromon.storage.step_history.rows import NAMES, PEAKS, TIMES, Row, Series, read_log, seg_files
from zeromon.storage.step_history.writer import damage_errors, rows_frame

if TYPE_CHECKING:
    import polars as pl


def collect_segment_rows(
    paths: Sequence[Path], query: Callable[[pl.LazyFrame], pl.LazyFrame]
) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Runs *query* over the rows of segments; returns its table and the names of unreadable segments.

    Reads only the columns that *query* needs, in pieces: a long history does not fit into memory.
    """
    # All at once first: a check of each segment would read a whole history twice
    with suppress(OSError, *damage_errors()):
        return query(_scan_segments(paths)).collect(engine="streaming"), ()
    readable = [path for path in paths if _is_readable_segment(path)]
    broken = tuple(path.name for path in paths if path not in readable)
    return query(_scan_segments(readable)).collect(), broken


def _scan_segments(paths: Sequence[Path]) -> pl.LazyFrame:
    import polars as pl

    # Without this empty table, concat raises for a history without segments
    frames = [rows_frame([]).lazy()]
    for path in paths:
        if path.suffix == ".log":
            frames.append(rows_frame(list(read_log(path))).lazy())
        else:
            frames.append(pl.scan_parquet(path).select(NAMES))
    return pl.concat(frames)


def _is_readable_segment(path: Path) -> bool:
    with suppress(OSError, *damage_errors()):
        _scan_segments([path]).collect()
        return True
    return False


MOST, MEDIAN, LEAST = -1, -2, -3
"""Rank numbers of series over all ranks: their maximum, median and minimum."""


def series_of_steps(folder: Path, query: StepQuery = WHOLE_RUN) -> Series:
    """Returns the rows that *query* selects, by rank and time; a merged row is of all its steps.

    Of more rows the extreme ones are kept: time is cut into equal ranges, and of each range the rows
    with the longest and the shortest step, the most exposed communication, and the most memory.
    """
    import polars as pl

    condition = pl.col("start_us") >= query.since_us
    if query.until_us is not None:
        condition &= pl.col("start_us") < query.until_us
    if query.ranks:
        condition &= pl.col("rank").is_in(list(query.ranks))
    if query.steps is not None:
        end_step = pl.col("step").cast(pl.Int64) + pl.max_horizontal(pl.col("steps"), 1)
        condition &= (pl.col("step") <= query.steps[1]) & (end_step > query.steps[0])
    sizes, _ = collect_segment_rows(
        list(seg_files(folder).values()),
        lambda rows: (
            rows.filter(condition)
            .group_by("rank")
            .agg(pl.len(), pl.col("start_us").min().alias("first"), pl.col("start_us").max())
        ),
    )
    if sizes.is_empty():
        return {name: [] for name in NAMES}
    first_us, last_us = _as_int(sizes["first"].min()), _as_int(sizes["start_us"].max())
    is_thinned = _as_int(sizes["len"].max()) > query.most

    def select_rows(rows: pl.LazyFrame) -> pl.LazyFrame:
        mine = rows.filter(condition)
        return _extreme_rows(mine, first_us, last_us, query.most) if is_thinned else mine

    # one segment after the other: the rows read are many, the rows kept are few
    frames = [collect_segment_rows([path], select_rows)[0] for path in seg_files(folder).values()]
    # A row that stands out in several figures is picked for each of them
    return pl.concat(frames).unique().sort("rank", "start_us").to_dict(as_series=False)


_EXTREMES = (
    ("duration_us", "max"), ("duration_us", "min"), ("exposed_us", "max"), ("rss_bytes", "max"),
    ("reserved_bytes", "max"),
)  # fmt: skip


def thin_series(columns: Series, max_rows: int) -> Series:
    """Returns *columns*, :func:`series_of_steps` and newer rows, with about *max_rows* a rank."""
    import polars as pl

    rows = pl.DataFrame(columns, schema=rows_frame([]).schema)
    first_us, last_us = _as_int(rows["start_us"].min()), _as_int(rows["start_us"].max())
    extremes = _extreme_rows(rows.lazy(), first_us, last_us, max_rows).collect()
    return extremes.unique().sort("rank", "start_us").to_dict(as_series=False)


def _extreme_rows(rows: pl.LazyFrame, first_us: int, last_us: int, max_rows: int) -> pl.LazyFrame:
    """Selects the extreme rows of each rank and of equal ranges of time, *first_us* to *last_us*."""
    import polars as pl

    width = max(1, -(-(last_us - first_us + 1) * len(_EXTREMES) // max_rows))
    time_range = (pl.col("start_us") - first_us) // width
    whole_row = pl.struct(NAMES)
    picks = [
        whole_row.get(getattr(pl.col(name), f"arg_{bound}")()).alias(f"{name}_{bound}")
        for name, bound in _EXTREMES
    ]
    return (
        rows.group_by("rank", time_range.alias("part"))
        .agg(picks)
        .select(pl.concat_list(f"{name}_{bound}" for name, bound in _EXTREMES).alias("row"))
        .explode("row")
        .unnest("row")
    )


def _as_int(value: Any) -> int:
    return int(value)


def last_steps_before(folder: Path, until_us: int, count: int) -> dict[int, list[Row]]:
    """Returns rank -> its last *count* rows with ``start_us <= until_us``, in the order of time."""
    import polars as pl

    by_rank: dict[int, list[Row]] = {}
    for path in reversed(seg_files(folder).values()):
        table, _ = collect_segment_rows(
            [path],
            lambda rows: (
                rows.filter(pl.col("start_us") <= until_us)
                .sort("start_us")
                .group_by("rank", maintain_order=True)
                .tail(count)
                .select(NAMES)
            ),
        )
        older: dict[int, list[Row]] = {}
        for row in table.iter_rows():
            older.setdefault(row[0], []).append(row)
        for rank in {*by_rank, *older}:
            by_rank[rank] = [*older.get(rank, ()), *by_rank.get(rank, ())][-count:]
        if by_rank and min(map(len, by_rank.values())) >= count:
            break
    return by_rank


def ranges_of_steps(folder: Path, count: int = 10) -> list[StepRange]:
    """Divides the history into *count* ranges of equally many steps; fewer for a short history."""
    import polars as pl

    paths = list(seg_files(folder).values())
    bounds, _ = collect_segment_rows(
        paths, lambda rows: rows.select(pl.col("step").min().alias("first"), pl.col("step").max())
    )
    first_step, last_step = bounds.row(0) if bounds.height else (None, None)
    if first_step is None or last_step is None:
        return []
    range_steps = max(1, -(-(last_step - first_step + 1) // count))
    timed = (pl.col("flags") & NOT_TIMED) == 0
    # The first step compiles and warms up, and would dominate the mean of its range
    past_first = pl.col("duration_us").filter(pl.col("step") > 1)
    rows, _ = collect_segment_rows(
        paths,
        lambda rows: (
            rows.group_by(((pl.col("step") - first_step) // range_steps).alias("part"))
            .agg(
                pl.col("step").min().alias("first"),
                pl.col("step").max().alias("last"),
                pl.coalesce(past_first.mean(), pl.col("duration_us").mean()).alias("mean"),
                pl.col("exposed_us").filter(timed).sum().alias("exposed"),
                pl.col("duration_us").filter(timed).sum().alias("spent"),
                pl.col("rss_bytes").max().alias("rss"),
                pl.col("reserved_bytes").max().alias("reserved"),
            )
            .sort("part")
        ),
    )
    return [
        StepRange(
            first_step=row["first"],
            last_step=row["last"],
            step_seconds=row["mean"] / 1e6,
            exposed_ratio=row["exposed"] / row["spent"] if row["spent"] else None,
            rss_bytes=row["rss"],
            reserved_bytes=row["reserved"],
        )
        for row in rows.iter_rows(named=True)
    ]


def by_step(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Aggregates over the ranks: one row a step, with means of times and maxima of bytes.

    Steps that an elastic restart counts again from an earlier number are rows of their own.
    """
    import polars as pl

    restarted = pl.col("step").cast(pl.Int64).diff().fill_null(0) < 0
    return (
        rows.sort("start_us")
        .with_columns(restarted.cum_sum().over("rank").alias("life"))
        .group_by("life", "step")
        .agg(
            pl.col("steps", "flags", "micro_steps", "collective_bytes", "start_us").max(),
            *(pl.col(name).filter(pl.col(name) >= 0).mean().fill_null(-1) for name in TIMES),
            pl.col(*PEAKS).max(),
        )
        .sort("life", "step")
        .drop("life")
    )


def frame_of_steps(folder: Path) -> pl.DataFrame:
    """Returns a whole history aggregated :func:`by_step`."""
    return collect_segment_rows(list(seg_files(folder).values()), by_step)[0]


def readable_segment_tables(folder: Path) -> tuple[list[pl.LazyFrame], tuple[str, ...]]:
    """Returns a history as tables that fit into memory, and the names of unreadable segments."""
    by_name = {path.name: _readable_segment_table(path) for path in seg_files(folder).values()}
    broken = tuple(name for name, table in by_name.items() if table is None)
    return [table for table in by_name.values() if table is not None], broken


def _readable_segment_table(path: Path) -> pl.LazyFrame | None:
    import polars as pl

    with suppress(OSError, *damage_errors()):
        table = _scan_segments([path])
        table.select(pl.len()).collect()  # raises for a broken file; the rows are read later
        return table.sort("start_us", "rank")
    return None
