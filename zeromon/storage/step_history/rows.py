"""One row of a step history: one step of one rank, as a tuple of numbers. Pure.

The columns are fixed, because logs and Parquet files hold them. Times are microseconds, sizes bytes.
A row of several merged steps holds means of times and scalars, and maxima of bytes. Scalars are floats,
or None where the step has none; the others are integers. ``communication_us`` is -1 where only the waits
for communication are known.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeromon.ring.codes import Phase
from zeromon.snapshot import StepSummary
from zeromon.snapshot.step import IDLE, SKIPPED, UNTIMED

COLUMNS = (
    ("rank", "I"), ("step", "I"), ("steps", "I"), ("flags", "I"), ("start_us", "q"),
    ("duration_us", "Q"), ("other_us", "Q"), ("forward_us", "Q"), ("backward_us", "Q"),
    ("optimizer_us", "Q"), ("data_wait_us", "Q"), ("cpu_optimizer_us", "Q"),
    ("communication_us", "q"), ("exposed_us", "Q"), ("offload_blocked_us", "Q"),
    ("collectives", "I"), ("micro_steps", "I"), ("collective_bytes", "q"), ("allocated_bytes", "q"),
    ("reserved_bytes", "q"), ("rss_bytes", "q"), ("other_bytes", "q"), ("other_exposed_us", "Q"),
    ("forward_exposed_us", "Q"), ("backward_exposed_us", "Q"), ("optimizer_exposed_us", "Q"),
    ("data_wait_exposed_us", "Q"), ("cpu_optimizer_exposed_us", "Q"), ("evaluation_us", "Q"),
    ("checkpoint_us", "Q"), ("garbage_collection_us", "Q"), ("compile_us", "Q"),
    ("evaluation_exposed_us", "Q"), ("checkpoint_exposed_us", "Q"),
    ("garbage_collection_exposed_us", "Q"), ("compile_exposed_us", "Q"),
    ("generation_us", "Q"), ("generation_exposed_us", "Q"),
    ("loss", "d"), ("grad_norm", "d"), ("learning_rate", "d"),
    ("samples", "d"), ("tokens", "d"),
)  # fmt: skip
"""Name and :mod:`struct` code of each column, in the order of a row."""

NAMES = tuple(name for name, _ in COLUMNS)
TIMES = tuple(name for name in NAMES if name.endswith("_us") and name != "start_us")
_PHASES = tuple(f"{phase.label}_us" for phase in Phase)
_EXPOSED = tuple(name.replace("_us", "_exposed_us") for name in _PHASES)
"""Exposed communication of each phase."""
_FIRST, _SECOND, _THIRD = slice(6), slice(6, 10), slice(10, None)
"""The phases whose columns stand together."""
SCALARS = tuple(name for name, code in COLUMNS if code == "d")
ABSENT = tuple(None if code == "d" else 0 for _, code in COLUMNS)
"""The value of each column where the figure does not exist."""
PEAKS = ("allocated_bytes", "reserved_bytes", "rss_bytes", "other_bytes")
_COUNTS = ("step", "micro_steps", "collectives", "collective_bytes")
_TRAINED = ("loss", "grad_norm", "learning_rate")

Row = tuple[Any, ...]
"""The values of one step in the order of :data:`COLUMNS`."""

Series = dict[str, list[Any]]
"""Rows as columns: name of the column -> its values."""


def row_of(rank: int, step: StepSummary, wall_minus_mono_ns: int) -> Row:
    """Returns the row of one step of *rank*; its start is microseconds since the epoch."""
    phases, exposed = (  # without a call for each of them
        [ns // 1000 if ns > 0 else 0 for ns in (*durations, *_NO_PHASES)[: len(_PHASES)]]
        for durations in (step.phase_ns, step.phase_exposed_ns)
    )
    untimed = not step.timed and not step.idle
    return (
        rank, step.step, 1, IDLE * step.idle | SKIPPED * step.skipped | UNTIMED * untimed,
        (step.start_ns + wall_minus_mono_ns) // 1000, _ns_to_us(step.end_ns - step.start_ns),
        *phases[_FIRST], _ns_to_us(step.communication_ns) if step.communication_ns >= 0 else -1,
        _ns_to_us(step.exposed_ns),
        _ns_to_us(step.offload_blocked_ns), step.collectives, step.micro_steps, step.collective_bytes,
        step.allocated_bytes, step.reserved_bytes, step.rss_bytes, step.other_bytes,
        *exposed[_FIRST], *phases[_SECOND], *exposed[_SECOND], *phases[_THIRD], *exposed[_THIRD],
        step.loss, step.grad_norm, step.learning_rate, _or_none(step.samples), _or_none(step.tokens),
    )  # fmt: skip


def _or_none(count: int) -> float | None:
    return count if count >= 0 else None


_NO_PHASES = (0,) * len(_PHASES)


def _ns_to_us(ns: int) -> int:
    # The columns are unsigned: a negative time of a damaged ring would cost the whole row
    return max(0, ns) // 1000


def step_of(row: Row, wall_minus_mono_ns: int) -> StepSummary:
    """Returns the step of a row, to the microsecond; fields that no row holds keep their defaults."""
    values = dict(zip(NAMES, row, strict=True))
    exposed = tuple(1000 * values[name] for name in _EXPOSED)
    start_ns = values["start_us"] * 1000 - wall_minus_mono_ns
    return StepSummary(
        start_ns=start_ns,
        end_ns=start_ns + values["duration_us"] * 1000,
        idle=bool(values["flags"] & IDLE),
        skipped=bool(values["flags"] & SKIPPED),
        phase_ns=tuple(1000 * values[name] for name in _PHASES),
        communication_ns=1000 * values["communication_us"],
        exposed_ns=1000 * values["exposed_us"],
        # all zero beside a total that is not: the split by phase is unknown, not zero
        phase_exposed_ns=exposed if any(exposed) or not values["exposed_us"] else (),
        offload_blocked_ns=1000 * values["offload_blocked_us"],
        # At least 1: with 0 the step would read as timed
        untimed=max(1, values["collectives"]) if values["flags"] & UNTIMED else 0,
        samples=_as_count(values["samples"]),
        tokens=_as_count(values["tokens"]),
        **{name: values[name] for name in (*_COUNTS, *PEAKS, *_TRAINED)},
    )


def _as_count(number: float | None) -> int:
    return round(number) if number is not None and math.isfinite(number) else -1


# ---- the log of a step history ------------------------------------------------------------------

MAGIC = b"ZMHIST\0\6"
BODY = struct.Struct("<" + "".join(code for _, code in COLUMNS))
"""Layout of a record, without its checksum."""
_CRC = struct.Struct("<I")
_FIRST_SCALAR = NAMES.index(SCALARS[0])
RECORD_SIZE = BODY.size + _CRC.size


def pack_row(row: Row) -> bytes:
    """Returns the record of *row* with its checksum; NaN stands for a scalar that it does not have.

    A row with a number that its column cannot hold, as of a damaged ring, has no record: b"".
    """
    scalars = [math.nan if value is None else value for value in row[_FIRST_SCALAR:]]
    try:
        body = BODY.pack(*row[:_FIRST_SCALAR], *scalars)
    except struct.error:
        return b""
    return body + _CRC.pack(zlib.crc32(body))


def unpack_rows(blob: bytes) -> Iterator[Row]:
    """Yields the whole records at the beginning of *blob* and stops at the first broken one."""
    for at in range(0, len(blob) - RECORD_SIZE + 1, RECORD_SIZE):
        record = blob[at : at + BODY.size]
        (crc,) = _CRC.unpack_from(blob, at + BODY.size)
        if zlib.crc32(record) != crc:
            return
        values = BODY.unpack(record)
        scalars = (None if value != value else value for value in values[_FIRST_SCALAR:])
        yield (*values[:_FIRST_SCALAR], *scalars)


def seg_files(folder: Path) -> dict[int, Path]:
    """Returns the segments in *folder*: number -> file.

    A log that was converted and not yet removed is left out: its Parquet file has the same rows.
    """
    by_number: dict[int, Path] = {}
    # In this order: the Parquet file takes the place of a log of the same number
    for suffix in (".log", ".parquet"):
        for path in folder.glob(f"[0-9]*{suffix}"):
            if path.stem.isdigit():
                by_number[int(path.stem)] = path
    return dict(sorted(by_number.items()))


def read_log(path: Path) -> Iterator[Row]:
    """Yields the rows of a log up to the first broken one; nothing for a file that is no log."""
    content = path.read_bytes()
    if content.startswith(MAGIC):
        yield from unpack_rows(content[len(MAGIC) :])
