"""The run store beside SQLite and DuckDB: `bench_store.py [ROWS [ours]]`.

Rows of 64 ranks go in by the second's worth (one batch a tick, as the collector writes), each batch
acknowledged when it survives the process; then size and queries in the same run. DuckDB is left out
where it is not installed. Then what a month of a 64-rank run leaves on disk, and how long a report of
all rows takes.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from records import keep

from zeromon.storage.run_store import StepQuery
from zeromon.storage.step_history.queries import collect_segment_rows, ranges_of_steps, series_of_steps
from zeromon.storage.step_history.rows import ABSENT, COLUMNS, NAMES, Row, seg_files
from zeromon.storage.step_history.writer import (
    LIMIT_BYTES,
    SEGMENT_ROWS,
    Writer,
    merge_oldest,
    rows_frame,
    write_parquet,
)

RANKS = 64
OURS = "ours" in sys.argv
"""Without other stores, and without a month."""
MONTH_STEPS = 30 * 86_400
CODES = {"I": "INTEGER", "q": "BIGINT", "Q": "BIGINT", "d": "DOUBLE"}
SCHEMA = ", ".join(f"{name} {CODES[code]}" for name, code in COLUMNS)
Timed = tuple[float, float]


def batches(rows: int, seed: int = 1) -> Iterator[list[Row]]:
    """Steps of 64 ranks of about a second, times with noise, memory in pages, all as they come."""
    chooser = np.random.default_rng(seed)
    for step in range(1, rows // RANKS + 1):
        noise = chooser.normal(0, 5_000, (RANKS, 6)).astype(np.int64).clip(-20_000)
        pages = chooser.integers(0, 64, RANKS)
        yield [
            (
                rank, step, 1, 0, step * 1_000_000 + rank, 1_000_000 + int(n[0]), 20_000 + int(n[1]),
                300_000 + int(n[2]), 550_000 + int(n[3]), 90_000, 5_000, 0,
                400_000 + int(n[4]), max(0, 80_000 + int(n[5])), 0, 40, 1, 123_456_789,
                -1, -1, (3 << 30) + int(page) * 4096, -1, 0, max(0, 20_000 + int(n[4])),
                max(0, 60_000 + int(n[5])), 0, 0, 0, *ABSENT[28:],
            )
            for rank, (n, page) in enumerate(zip(noise, pages, strict=True))
        ]  # fmt: skip


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def timed(call: Callable[[], Any], rounds: int = 3) -> float:
    """The shortest of some rounds, seconds."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


def ours(folder: Path, rows: int) -> tuple[float, Callable[[], Any], Callable[[], Any]]:
    """Seconds to take *rows*, the query of all ranks, and that of one."""
    writer = Writer(folder)
    spent = 0.0
    for batch in batches(rows):
        begin = time.perf_counter()
        writer.append(batch)
        spent += time.perf_counter() - begin
    writer.close()
    return (spent, lambda: percentiles(folder), lambda: series_of_steps(folder, StepQuery(ranks=(7,))))


def percentiles(folder: Path) -> Any:
    """p50 and p99 of each rank's step time."""
    import polars as pl

    found, _ = collect_segment_rows(
        list(seg_files(folder).values()),
        lambda rows: rows.group_by("rank").agg(
            pl.col("duration_us").quantile(0.5).alias("p50"),
            pl.col("duration_us").quantile(0.99).alias("p99"),
        ),
    )
    return found


def sqlite(folder: Path, rows: int) -> tuple[float, Callable[[], Any], Callable[[], Any]]:
    """The same by SQLite, with a log ahead and a key by rank and step."""
    base = sqlite3.connect(folder / "rows.sqlite", isolation_level=None)
    base.execute("PRAGMA journal_mode=WAL")
    base.execute("PRAGMA synchronous=NORMAL")
    base.execute(f"CREATE TABLE rows ({SCHEMA}, PRIMARY KEY (rank, step)) WITHOUT ROWID")
    spent = fill(base, rows, "BEGIN", "COMMIT")
    every = "SELECT rank, duration_us FROM rows ORDER BY rank, duration_us"
    return (
        spent,
        lambda: quantiles(base.execute(every).fetchall()),
        lambda: base.execute("SELECT * FROM rows WHERE rank = 7").fetchall(),
    )


def quantiles(rows: list[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """What SQLite has no function for, over rows that are sorted."""
    by_rank: dict[int, list[int]] = {}
    for rank, value in rows:
        by_rank.setdefault(rank, []).append(value)
    return {r: (v[len(v) // 2], v[len(v) * 99 // 100]) for r, v in by_rank.items()}


def duckdb(folder: Path, rows: int) -> tuple[float, Callable[[], Any], Callable[[], Any]]:
    """The same by DuckDB."""
    base = importlib.import_module("duckdb").connect(str(folder / "rows.duckdb"))
    base.execute(f"CREATE TABLE rows ({SCHEMA})")
    spent = fill(base, rows, "BEGIN TRANSACTION", "COMMIT")
    query = "SELECT rank, quantile_cont(duration_us, [0.5, 0.99]) FROM rows GROUP BY rank"
    return (
        spent,
        lambda: base.execute(query).fetchall(),
        lambda: base.execute("SELECT * FROM rows WHERE rank = 7").fetchall(),
    )


def fill(base: Any, rows: int, begin: str, end: str) -> float:
    """One transaction a batch."""
    statement = f"INSERT INTO rows VALUES ({', '.join('?' * len(NAMES))})"
    spent = 0.0
    for batch in batches(rows):
        start = time.perf_counter()
        base.execute(begin)
        base.executemany(statement, batch)
        base.execute(end)
        spent += time.perf_counter() - start
    return spent


def beside(rows: int) -> None:
    """All stores with the same rows."""
    stores = {"zeromon": ours, "SQLite": sqlite, "DuckDB": duckdb}
    if importlib.util.find_spec("duckdb") is None:
        del stores["DuckDB"]
    stores = {"zeromon": ours} if OURS else stores
    print(f"{rows:,} rows of {RANKS} ranks, a batch a second")
    print(f"{'':10}{'rows/s in':>12}{'B/row':>8}{'p50/p99, ms':>13}{'one rank, ms':>14}")
    for name, store in stores.items():
        folder = Path(tempfile.mkdtemp(prefix="zeromon-store-"))
        count = rows if name == "zeromon" else min(rows, 200_000)
        spent, every, one = store(folder, count)
        if name == "zeromon":
            keep("written", count / spent, "rows/s", "higher")
            keep("a row", size(folder) / count, "bytes")
        print(
            f"{name:10}{count / spent:12,.0f}{size(folder) / count:8.1f}"
            f"{1e3 * timed(every):13.0f}{1e3 * timed(one):14.0f}   ({count:,} rows)"
        )
        shutil.rmtree(folder)


def month() -> None:
    """A month of a 64-rank run at a step a second, written at its real rate of bytes."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-month-"))
    each = SEGMENT_ROWS // RANKS
    made = [row for batch in batches(each * RANKS) for row in batch]
    segment, begin = rows_frame(made), time.perf_counter()
    import polars as pl

    for number, first in enumerate(range(0, MONTH_STEPS, each), 1):
        shifted = segment.with_columns(
            (pl.col("step") + first).cast(pl.UInt32), pl.col("start_us") + first * 1_000_000
        )
        write_parquet(shifted, folder / f"{number:06}.parquet")
        if number % 8 == 0:
            merge_oldest(folder, LIMIT_BYTES)
    merge_oldest(folder, LIMIT_BYTES)
    whole, _ = collect_segment_rows(
        list(seg_files(folder).values()),
        lambda rows: rows.select(
            pl.len().alias("rows"),
            pl.col("steps").sum(),
            pl.col("start_us").min().alias("first"),
            (pl.col("steps") == 1).sum().alias("single"),
        ),
    )
    count, steps, first_us, single = whole.row(0)
    print(
        f"a month of {RANKS} ranks at a step a second: {MONTH_STEPS * RANKS:,} rows become {count:,} in "
        f"{size(folder) / 1e9:.2f} GB; {steps / (MONTH_STEPS * RANKS):.1%} of the steps are in them, "
        f"{single / RANKS / 3600:.0f} h step by step; written in {time.perf_counter() - begin:.0f} s"
    )
    assert first_us < 2 * each * 1_000_000
    shutil.rmtree(folder)


def report(rows: int) -> None:
    """What a report asks for, of a long history."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-report-"))
    writer = Writer(folder)
    for batch in batches(rows):
        writer.append(batch)
    writer.close()
    table = timed(lambda: ranges_of_steps(folder), 1)
    lines = timed(lambda: series_of_steps(folder), 1)
    keep("table over time", table, "s")
    keep("charts", lines, "s")
    print(f"a report of {rows:,} rows: its table over time {table:.2f} s, its charts {lines:.2f} s")
    shutil.rmtree(folder)


def main() -> None:
    """Prints the ratios."""
    os.environ.setdefault("POLARS_MAX_THREADS", "2")
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    beside(rows)
    report(rows)
    if not OURS:
        month()


if __name__ == "__main__":
    main()
