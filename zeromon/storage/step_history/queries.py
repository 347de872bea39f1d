"""Queries over a step history: all rows, a series for a chart, the last steps, ranges of steps.

A segment that cannot be read is left out. polars is imported by the functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromon.snapshot import StepRange
from zeromon.snapshot.step import NOT_TIMED
from zeromon.storage.run_store import WHOLE_RUN, StepQuery
from zeromon.storage.step_history.parquet import frame, unreadable
from zeromon.storage.step_history.rows import NAMES, PEAKS, TIMES, Row, Series, read_log, segments

if TYPE_CHECKING:
    import polars as pl


def load(folder: Path, ranks: Sequence[int] = ()) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Returns all rows (of *ranks*) sorted by time, and the names of segments that cannot be read."""
    import polars as pl

    def query(rows: pl.LazyFrame) -> pl.LazyFrame:
        mine = rows.filter(pl.col("rank").is_in(list(ranks))) if ranks else rows
        return mine.sort("start_us", "rank")

    return collect(list(segments(folder).values()), query)


def collect(
    paths: Sequence[Path], query: Callable[[pl.LazyFrame], pl.LazyFrame]
) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Runs *query* over the rows of segments; returns its table and the names of unreadable segments.

    Reads only the columns that *query* needs, in pieces: a long history does not fit into memory.
    """
    with suppress(OSError, *unreadable()):
        return query(_scan(paths)).collect(engine="streaming"), ()
    readable = [path for path in paths if _is_whole(path)]
    broken = tuple(path.name for path in paths if path not in readable)
    return query(_scan(readable)).collect(), broken


def _scan(paths: Sequence[Path]) -> pl.LazyFrame:
    import polars as pl

    parts = [frame([]).lazy()]
    for path in paths:
        if path.suffix == ".log":
            parts.append(frame(list(read_log(path))).lazy())
        else:
            parts.append(pl.scan_parquet(path).select(NAMES))
    return pl.concat(parts)


def _is_whole(path: Path) -> bool:
    with suppress(OSError, *unreadable()):
        _scan([path]).collect()
        return True
    return False


MOST, MEDIAN, LEAST = -1, -2, -3
"""Rank numbers of series over all ranks: their maximum, median and minimum."""


def series(folder: Path, asked: StepQuery = WHOLE_RUN) -> Series:
    """Returns the rows that are *asked* for, by rank and time; a merged row is of all its steps.

    Of more rows the extreme ones are kept: time is cut into equal ranges, and of each range the rows
    with the longest and the shortest step, the most exposed communication, and the most memory.
    """
    import polars as pl

    wanted = pl.col("start_us") >= asked.since_us
    if asked.until_us is not None:
        wanted &= pl.col("start_us") < asked.until_us
    if asked.ranks:
        wanted &= pl.col("rank").is_in(list(asked.ranks))
    if asked.steps is not None:
        end = pl.col("step").cast(pl.Int64) + pl.max_horizontal(pl.col("steps"), 1)
        wanted &= (pl.col("step") <= asked.steps[1]) & (end > asked.steps[0])
    sizes, _ = collect(
        list(segments(folder).values()),
        lambda rows: (
            rows.filter(wanted)
            .group_by("rank")
            .agg(pl.len(), pl.col("start_us").min().alias("first"), pl.col("start_us").max())
        ),
    )
    if sizes.is_empty():
        return {name: [] for name in NAMES}
    first, last = _integer(sizes["first"].min()), _integer(sizes["start_us"].max())
    many = _integer(sizes["len"].max()) > asked.most

    def query(rows: pl.LazyFrame) -> pl.LazyFrame:
        mine = rows.filter(wanted)
        return _extremes(mine, first, last, asked.most) if many else mine

    # one segment after the other: the rows read are many, the rows kept are few
    kept = [collect([path], query)[0] for path in segments(folder).values()]
    return pl.concat(kept).unique().sort("rank", "start_us").to_dict(as_series=False)


_EXTREMES = (
    ("duration_us", "max"),
    ("duration_us", "min"),
    ("exposed_us", "max"),
    ("rss_bytes", "max"),
    ("reserved_bytes", "max"),
)


def thinned(known: Series, most: int) -> Series:
    """Returns *known*, a :func:`series` with newer rows behind it, with about *most* rows a rank."""
    import polars as pl

    rows = pl.DataFrame(known, schema=frame([]).schema)
    first, last = _integer(rows["start_us"].min()), _integer(rows["start_us"].max())
    kept = _extremes(rows.lazy(), first, last, most).collect()
    return kept.unique().sort("rank", "start_us").to_dict(as_series=False)


def _extremes(rows: pl.LazyFrame, first: int, last: int, most: int) -> pl.LazyFrame:
    """Selects the extreme rows of each rank and range of time: *first* to *last* in equal ranges."""
    import polars as pl

    width = max(1, -(-(last - first + 1) * len(_EXTREMES) // most))
    part = (pl.col("start_us") - first) // width
    whole = pl.struct(NAMES)
    picks = [
        whole.get(getattr(pl.col(name), f"arg_{end}")()).alias(f"{name}_{end}")
        for name, end in _EXTREMES
    ]
    return (
        rows.group_by("rank", part.alias("part"))
        .agg(picks)
        .select(pl.concat_list(f"{name}_{end}" for name, end in _EXTREMES).alias("row"))
        .explode("row")
        .unnest("row")
    )


def _integer(value: Any) -> int:
    return int(value)


def last_steps(folder: Path, until_us: int, count: int) -> dict[int, list[Row]]:
    """Returns rank -> its last *count* rows with ``start_us <= until_us``, in the order of time."""
    import polars as pl

    kept: dict[int, list[Row]] = {}
    for path in reversed(segments(folder).values()):
        found, _ = collect(
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
        for row in found.iter_rows():
            older.setdefault(row[0], []).append(row)
        for rank in {*kept, *older}:
            kept[rank] = [*older.get(rank, ()), *kept.get(rank, ())][-count:]
        if kept and min(map(len, kept.values())) >= count:
            break
    return kept


def step_ranges(folder: Path, count: int = 10) -> list[StepRange]:
    """Divides the history into *count* ranges of equally many steps; fewer for a short history."""
    import polars as pl

    paths = list(segments(folder).values())
    ends, _ = collect(
        paths, lambda rows: rows.select(pl.col("step").min().alias("first"), pl.col("step").max())
    )
    first, last = ends.row(0) if ends.height else (None, None)
    if first is None or last is None:
        return []
    each = max(1, -(-(last - first + 1) // count))
    timed = (pl.col("flags") & NOT_TIMED) == 0
    usual = pl.col("duration_us").filter(pl.col("step") > 1)
    rows, _ = collect(
        paths,
        lambda rows: (
            rows.group_by(((pl.col("step") - first) // each).alias("part"))
            .agg(
                pl.col("step").min().alias("first"),
                pl.col("step").max().alias("last"),
                pl.coalesce(usual.mean(), pl.col("duration_us").mean()).alias("mean"),
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


def steps(folder: Path) -> pl.DataFrame:
    """Returns a whole history aggregated :func:`by_step`."""
    return collect(list(segments(folder).values()), by_step)[0]


def pieces(folder: Path) -> tuple[list[pl.LazyFrame], tuple[str, ...]]:
    """Returns a history as tables that fit into memory, and the names of unreadable segments."""
    by_name = {path.name: _piece(path) for path in segments(folder).values()}
    broken = tuple(name for name, piece in by_name.items() if piece is None)
    return [piece for piece in by_name.values() if piece is not None], broken


def _piece(path: Path) -> pl.LazyFrame | None:
    import polars as pl

    with suppress(OSError, *unreadable()):
        piece = _scan([path])
        piece.select(pl.len()).collect()  # raises for a broken file; the rows are read later
        return piece.sort("start_us", "rank")
    return None
