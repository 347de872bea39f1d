"""The history of a run on disk: one row a rank and step, kept through ``kill -9``, small for months.

``<run>/history/`` holds numbered segments. The newest is a log (``000007.log``) of fixed records with a
checksum each; what was written is kept whatever becomes of the writer, and a torn end is cut off. A
full log becomes Parquet (``000007.parquet``, written aside and renamed; only then the log goes). When
all take more than a limit, the oldest rows are merged by sixteen, and by sixteen again: means of times,
maxima of bytes, and how many steps a row is of.

polars reads and writes Parquet, and is imported only for that.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromon import paths
from zeromon.errors import HistoryError
from zeromon.snapshot import StepSummary, Stretch

if TYPE_CHECKING:
    import polars as pl

MAGIC = b"ZMHIST\0\2"
COLUMNS = (
    ("rank", "I"), ("step", "I"), ("steps", "I"), ("flags", "I"), ("start_us", "q"),
    ("duration_us", "Q"), ("other_us", "Q"), ("forward_us", "Q"), ("backward_us", "Q"),
    ("optimizer_us", "Q"), ("data_wait_us", "Q"), ("cpu_optimizer_us", "Q"),
    ("communication_us", "Q"), ("exposed_us", "Q"), ("offload_blocked_us", "Q"),
    ("collectives", "I"), ("micro_steps", "I"), ("collective_bytes", "q"), ("allocated_bytes", "q"),
    ("reserved_bytes", "q"), ("rss_bytes", "q"), ("other_bytes", "q"), ("other_exposed_us", "Q"),
    ("forward_exposed_us", "Q"), ("backward_exposed_us", "Q"), ("optimizer_exposed_us", "Q"),
    ("data_wait_exposed_us", "Q"), ("cpu_optimizer_exposed_us", "Q"),
)  # fmt: skip
"""Names and :mod:`struct` codes. Times of a row are means over its *steps*, bytes are maxima."""
_FORMER = 22
"""How many of the columns a log of the first version has, and segments that were made of one."""

IDLE, SKIPPED = 1, 2
"""Bits of ``flags``."""

NAMES = tuple(name for name, _ in COLUMNS)
_BODY = struct.Struct("<" + "".join(code for _, code in COLUMNS))
_BODIES = {
    MAGIC: _BODY,
    b"ZMHIST\0\1": struct.Struct("<" + "".join(code for _, code in COLUMNS[:_FORMER])),
}
"""Of a log that begins so, a record without its checksum."""
_CRC = struct.Struct("<I")
RECORD_SIZE = _BODY.size + _CRC.size
SEGMENT_ROWS = 200_000
LIMIT_BYTES = 768 << 20
MERGED = 16
_KEPT_WHOLE = 2
_TIMES = tuple(name for name in NAMES if name.endswith("_us") and name != "start_us")
_PHASES = (
    "other_us",
    "forward_us",
    "backward_us",
    "optimizer_us",
    "data_wait_us",
    "cpu_optimizer_us",
)
"""In the order of :class:`zeromon.events.Phase`."""
_EXPOSED = tuple(name.replace("_us", "_exposed_us") for name in _PHASES)
"""What of each phase was spent waiting for communication."""
_PEAKS = ("allocated_bytes", "reserved_bytes", "rss_bytes", "other_bytes")

Row = tuple[int, ...]
"""In the order of :data:`COLUMNS`."""


def row_of(rank: int, step: StepSummary, wall_minus_mono_ns: int) -> Row:
    """The row of one step; its start on the wall's clock."""
    phases, exposed = (
        [_us(ns) for ns in (*spent, *_NO_PHASES)[: len(_PHASES)]]
        for spent in (step.phase_ns, step.phase_exposed_ns)
    )
    return (
        rank, step.step, 1, IDLE * step.idle | SKIPPED * step.skipped,
        (step.start_ns + wall_minus_mono_ns) // 1000, _us(step.end_ns - step.start_ns), *phases,
        _us(step.communication_ns), _us(step.exposed_ns), _us(step.offload_blocked_ns),
        step.collectives, step.micro_steps, step.collective_bytes, step.allocated_bytes,
        step.reserved_bytes, step.rss_bytes, step.other_bytes, *exposed,
    )  # fmt: skip


_NO_PHASES = (0,) * len(_PHASES)


def _us(ns: int) -> int:
    return max(0, ns) // 1000


def pack(row: Row) -> bytes:
    """A record with its checksum."""
    body = _BODY.pack(*row)
    return body + _CRC.pack(zlib.crc32(body))


def unpack(blob: bytes, body: struct.Struct = _BODY) -> Iterator[Row]:
    """The whole records at the beginning of *blob*; the first broken one ends them.

    What records of a former version lack is 0.
    """
    size = body.size + _CRC.size
    rest = (0,) * (len(COLUMNS) - len(body.unpack(bytes(body.size))))
    for at in range(0, len(blob) - size + 1, size):
        found = blob[at : at + body.size]
        (crc,) = _CRC.unpack_from(blob, at + body.size)
        if zlib.crc32(found) != crc:
            return
        yield body.unpack(found) + rest


# ---- writing --------------------------------------------------------------------------------------


class Writer:
    """The one writer of a run's history; raises :class:`HistoryError` when it cannot go on."""

    def __init__(
        self, folder: Path, *, segment_rows: int = SEGMENT_ROWS, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.folder = paths.make_private(folder)
        self._segment_rows = segment_rows
        self._limit = limit_bytes
        self._fd = -1
        self._rows = 0
        self._last: dict[int, int] = {}
        """Rank -> start of the newest row that is kept."""
        self._number = 0
        try:
            self._resume()
        except OSError as error:
            raise HistoryError(f"cannot write {folder}: {error.strerror}") from error

    def _resume(self) -> None:
        """Goes on where an earlier writer ended; cuts off what it did not finish."""
        for path in self.folder.glob(".*"):
            path.unlink(missing_ok=True)
        found = segments(self.folder)
        self._number = max(found, default=0) or 1
        if found.get(self._number, Path()).suffix == ".parquet":
            self._number += 1
        newest = found.get(self._number)
        if newest is not None and newest.suffix == ".log" and _body_of(newest) not in (None, _BODY):
            self._number += 1  # a former version's: it has no room for what is known now
        for number, path in found.items():
            if path.suffix == ".log" and number != self._number:
                self._close_segment(path)  # its writer ended before it was closed
        for rank, start in last_starts(self.folder).items():
            self._last[rank] = start
        self._open()

    def _open(self) -> None:
        path = self.folder / f"{self._number:06}.log"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        if size < len(MAGIC) or os.pread(self._fd, len(MAGIC), 0) != MAGIC:
            os.ftruncate(self._fd, 0)
            os.write(self._fd, MAGIC)
            self._rows = 0
            return
        self._rows = sum(1 for _ in read_log(path))
        os.ftruncate(self._fd, len(MAGIC) + self._rows * RECORD_SIZE)

    def append(self, rows: Iterable[Row]) -> int:
        """Keeps what is new of *rows*, by rank and start, beyond this process; returns how many."""
        fresh = [row for row in rows if row[4] > self._last.get(row[0], -(1 << 62))]
        if not fresh:
            return 0
        blob = b"".join(map(pack, fresh))
        try:
            written = os.write(self._fd, blob)
        except OSError as error:
            raise HistoryError(f"cannot write {self.folder}: {error.strerror}") from error
        if written < len(blob):  # a disk that is full takes a part, which the next reader cuts off
            raise HistoryError(f"cannot write {self.folder}: no space left")
        for row in fresh:
            self._last[row[0]] = max(row[4], self._last.get(row[0], row[4]))
        self._rows += len(fresh)
        if self._rows >= self._segment_rows:
            self.close_segment()
        return len(fresh)

    def close_segment(self) -> None:
        """Turns the log into Parquet, begins the next, and keeps all below the limit."""
        if not self._rows:
            return
        try:
            os.close(self._fd)
            self._fd = -1
            self._close_segment(self.folder / f"{self._number:06}.log")
            self._number += 1
            self._open()
            shrink(self.folder, self._limit)
        except OSError as error:
            raise HistoryError(f"cannot write {self.folder}: {error.strerror}") from error

    def _close_segment(self, log: Path) -> None:
        rows = list(read_log(log))
        if rows:
            _write(frame(rows), log.with_suffix(".parquet"))
        log.unlink()

    def close(self) -> None:
        """Leaves the log as it is: a reader takes it as it takes Parquet."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write(content: pl.DataFrame, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        content.write_parquet(temporary, compression="zstd", statistics=True)
        temporary.chmod(0o600)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def shrink(folder: Path, limit_bytes: int) -> None:
    """Merges the oldest segments by sixteen until all take less than *limit_bytes*; at last drops."""
    for _ in range(1000):
        found = sorted(segments(folder).items())
        total = sum(path.stat().st_size for _, path in found)
        closed = [path for _, path in found if path.suffix == ".parquet"]
        if total <= limit_bytes or not closed:
            return
        older = closed[:-_KEPT_WHOLE] or closed[:1]
        whole = [path for path in older if _level(path) < 2]
        if not whole:
            older[0].unlink()
            continue
        path = min(whole, key=lambda p: (_level(p), p))
        _write(merged(_read_parquet(path)), path)


def _level(path: Path) -> int:
    """How often a segment was merged."""
    import polars as pl

    most = pl.scan_parquet(path).select(pl.col("steps").max()).collect().item() or 1
    return 0 if most == 1 else 1 if most <= MERGED else 2


def merged(content: pl.DataFrame) -> pl.DataFrame:
    """Every sixteen rows of a rank as one: times weighted by their steps, bytes at their most."""
    import polars as pl

    weighted = [
        ((pl.col(name) * pl.col("steps")).sum() / pl.col("steps").sum())
        .round()
        .cast(pl.UInt64)
        .alias(name)
        for name in _TIMES
    ]
    return (
        content.sort("rank", "start_us")
        .with_columns((pl.int_range(pl.len()).over("rank") // MERGED).alias("part"))
        .group_by("rank", "part", maintain_order=True)
        .agg(
            pl.col("step").first(),
            pl.col("flags").max(),
            pl.col("start_us").first(),
            *weighted,
            pl.col("collectives").mean().round().cast(pl.UInt32),
            pl.col("micro_steps").max(),
            pl.col("collective_bytes").mean().round().cast(pl.Int64),
            *(pl.col(name).max() for name in _PEAKS),
            pl.col("steps").sum().cast(pl.UInt32).alias("steps"),
        )
        .select(NAMES)
    )


# ---- reading --------------------------------------------------------------------------------------


def segments(folder: Path) -> dict[int, Path]:
    """Number -> file; where a log was closed and not yet removed, the closed one."""
    found: dict[int, Path] = {}
    for suffix in (".log", ".parquet"):
        for path in folder.glob(f"[0-9]*{suffix}"):
            if path.stem.isdigit():
                found[int(path.stem)] = path
    return dict(sorted(found.items()))


def read_log(path: Path) -> Iterator[Row]:
    """The rows of a log, up to the first that is not whole; none of a file that is no log."""
    body = _body_of(path)
    if body is not None:
        yield from unpack(path.read_bytes()[len(MAGIC) :], body)


def _body_of(log: Path) -> struct.Struct | None:
    with log.open("rb") as content:
        return _BODIES.get(content.read(len(MAGIC)))


def _read_parquet(path: Path) -> pl.DataFrame:
    """Without a map of the file: it may be replaced while it is read."""
    import polars as pl

    return _with_all(pl.read_parquet(path, memory_map=False).lazy()).collect()


def _with_all(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Rows with all columns; what those of a former version lack is 0."""
    import polars as pl

    known = rows.collect_schema().names()
    lacking = [pl.lit(0, pl.UInt64).alias(name) for name in NAMES[_FORMER:] if name not in known]
    return rows.with_columns(lacking).select(NAMES)


def last_starts(folder: Path) -> dict[int, int]:
    """Rank -> start of its newest row."""
    found: dict[int, int] = {}
    for path in segments(folder).values():
        for rank, start in _starts(path):
            found[rank] = max(start, found.get(rank, start))
    return found


def _starts(path: Path) -> Iterator[tuple[int, int]]:
    if path.suffix == ".log":
        yield from ((row[0], row[4]) for row in read_log(path))
        return
    import polars as pl

    with suppress(pl.exceptions.PolarsError):
        newest = _read_parquet(path).group_by("rank").agg(pl.col("start_us").max())
        yield from newest.iter_rows()


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    """Rows as a table."""
    import polars as pl

    kinds: Mapping[str, Any] = {"I": pl.UInt32, "q": pl.Int64, "Q": pl.UInt64}
    schema = {name: kinds[code] for name, code in COLUMNS}
    return pl.DataFrame(rows, schema=schema, orient="row")


def load(folder: Path, ranks: Sequence[int] = ()) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """All rows of a history (of *ranks*), by time, and the names of segments that cannot be read."""
    import polars as pl

    def query(rows: pl.LazyFrame) -> pl.LazyFrame:
        mine = rows.filter(pl.col("rank").is_in(list(ranks))) if ranks else rows
        return mine.sort("start_us", "rank")

    return _collect(list(segments(folder).values()), query)


def _collect(
    found: Sequence[Path], query: Callable[[pl.LazyFrame], pl.LazyFrame]
) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """What *query* makes of the rows of segments, and the names of those that had to be left out.

    Only the columns that it needs are read, in pieces: a long history does not fit into memory.
    """
    import polars as pl

    with suppress(OSError, pl.exceptions.PolarsError):
        return query(_scan(found)).collect(engine="streaming"), ()
    readable = [path for path in found if _is_whole(path)]
    broken = tuple(path.name for path in found if path not in readable)
    return query(_scan(readable)).collect(), broken


def _scan(found: Sequence[Path]) -> pl.LazyFrame:
    import polars as pl

    parts = [frame([]).lazy()]
    for path in found:
        if path.suffix == ".log":
            parts.append(frame(list(read_log(path))).lazy())
        else:
            parts.append(_with_all(pl.scan_parquet(path)))
    return pl.concat(parts)


def _is_whole(path: Path) -> bool:
    import polars as pl

    try:
        _scan([path]).collect()
    except (OSError, pl.exceptions.PolarsError):
        return False
    return True


MOST, MEDIAN, LEAST = -1, -2, -3
"""Instead of a rank in a series that is of all ranks together: their most, median and least."""

Series = dict[str, list[int]]
"""The columns of some rows, by the names of :data:`COLUMNS`."""


def series(
    folder: Path,
    since_us: int = 0,
    until_us: int | None = None,
    ranks: Sequence[int] = (),
    most: int = 600,
) -> Series:
    """Rows that began in ``since_us <= start_us < until_us``, by rank and time; about *most* a rank.

    Of more than that the extreme ones are kept: in each of as many stretches of time as fit, the rows
    with the longest and the shortest step, the most exposed communication, and the most memory.
    """
    import polars as pl

    wanted = pl.col("start_us") >= since_us
    if until_us is not None:
        wanted &= pl.col("start_us") < until_us
    if ranks:
        wanted &= pl.col("rank").is_in(list(ranks))
    sizes, _ = _collect(
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
    stretch = max(1, -(-(last - first + 1) * len(_EXTREMES) // most))
    many = _integer(sizes["len"].max()) > most

    def query(rows: pl.LazyFrame) -> pl.LazyFrame:
        mine = rows.filter(wanted)
        return _extremes(mine, (pl.col("start_us") - first) // stretch) if many else mine

    # one segment after the other: what is kept of each is small, what is read is not
    kept = [_collect([path], query)[0] for path in segments(folder).values()]
    return pl.concat(kept).unique().sort("rank", "start_us").to_dict(as_series=False)


_EXTREMES = (
    ("duration_us", "max"),
    ("duration_us", "min"),
    ("exposed_us", "max"),
    ("rss_bytes", "max"),
    ("reserved_bytes", "max"),
)


def _extremes(rows: pl.LazyFrame, part: pl.Expr) -> pl.LazyFrame:
    """Of each rank and *part* the rows that stand out."""
    import polars as pl

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
    """Rank -> its last *count* rows that began by *until_us*, in the order of time."""
    import polars as pl

    kept: dict[int, list[Row]] = {}
    for path in reversed(segments(folder).values()):
        found, _ = _collect(
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


def step_of(row: Row, wall_minus_mono_ns: int) -> StepSummary:
    """The step that a row is of, to the microsecond; what rows do not keep is left out."""
    facts = dict(zip(NAMES, row, strict=True))
    exposed = tuple(1000 * facts[name] for name in _EXPOSED)
    start_ns = facts["start_us"] * 1000 - wall_minus_mono_ns
    return StepSummary(
        step=facts["step"],
        start_ns=start_ns,
        end_ns=start_ns + facts["duration_us"] * 1000,
        idle=bool(facts["flags"] & IDLE),
        skipped=bool(facts["flags"] & SKIPPED),
        phase_ns=tuple(1000 * facts[name] for name in _PHASES),
        communication_ns=1000 * facts["communication_us"],
        exposed_ns=1000 * facts["exposed_us"],
        # where nothing is known of a step by phase, it is not known to be none
        phase_exposed_ns=exposed if any(exposed) or not facts["exposed_us"] else (),
        offload_blocked_ns=1000 * facts["offload_blocked_us"],
        micro_steps=facts["micro_steps"],
        collectives=facts["collectives"],
        collective_bytes=facts["collective_bytes"],
        allocated_bytes=facts["allocated_bytes"],
        reserved_bytes=facts["reserved_bytes"],
        rss_bytes=facts["rss_bytes"],
        other_bytes=facts["other_bytes"],
    )


def slices(folder: Path, count: int = 10) -> list[Stretch]:
    """The history in *count* stretches of as many steps each; fewer for a short one."""
    import polars as pl

    found = list(segments(folder).values())
    ends, _ = _collect(
        found,
        lambda rows: rows.select(pl.col("step").min().alias("first"), pl.col("step").max()),
    )
    first, last = ends.row(0) if ends.height else (None, None)
    if first is None or last is None:
        return []
    each = max(1, -(-(last - first + 1) // count))
    timed = (pl.col("flags") & IDLE) == 0
    rows, _ = _collect(
        found,
        lambda rows: (
            rows.group_by(((pl.col("step") - first) // each).alias("part"))
            .agg(
                pl.col("step").min().alias("first"),
                pl.col("step").max().alias("last"),
                pl.col("duration_us").median().alias("median"),
                pl.col("exposed_us").filter(timed).sum().alias("exposed"),
                pl.col("duration_us").filter(timed).sum().alias("spent"),
                pl.col("rss_bytes").max().alias("rss"),
                pl.col("reserved_bytes").max().alias("reserved"),
            )
            .sort("part")
        ),
    )
    return [
        Stretch(
            first_step=row["first"],
            last_step=row["last"],
            step_seconds=row["median"] / 1e6,
            exposed_ratio=row["exposed"] / row["spent"] if row["spent"] else None,
            rss_bytes=row["rss"],
            reserved_bytes=row["reserved"],
        )
        for row in rows.iter_rows(named=True)
    ]


def by_step(rows: pl.LazyFrame) -> pl.LazyFrame:
    """One row a step instead of one a rank and step: means of times over the ranks, the most of bytes.

    The steps that an elastic restart counts anew are steps of their own.
    """
    import polars as pl

    counted_anew = pl.col("step").cast(pl.Int64).diff().fill_null(0) < 0
    return (
        rows.sort("start_us")
        .with_columns(counted_anew.cum_sum().over("rank").alias("life"))
        .group_by("life", "step")
        .agg(
            pl.col("steps", "flags", "micro_steps", "collective_bytes", "start_us").max(),
            pl.col(*_TIMES).mean(),
            pl.col(*_PEAKS).max(),
        )
        .sort("life", "step")
        .drop("life")
    )


def steps(folder: Path) -> pl.DataFrame:
    """A history :func:`by_step`."""
    return _collect(list(segments(folder).values()), by_step)[0]


def pieces(folder: Path) -> tuple[list[pl.LazyFrame], tuple[str, ...]]:
    """A history in pieces that fit into memory, and the names of segments that cannot be read."""
    found = {path.name: _piece(path) for path in segments(folder).values()}
    broken = tuple(name for name, piece in found.items() if piece is None)
    return [piece for piece in found.values() if piece is not None], broken


def _piece(path: Path) -> pl.LazyFrame | None:
    import polars as pl

    with suppress(OSError, pl.exceptions.PolarsError):
        piece = _scan([path])
        piece.select(pl.len()).collect()  # what tells a whole file; its rows are read later
        return piece.sort("start_us", "rank")
    return None
