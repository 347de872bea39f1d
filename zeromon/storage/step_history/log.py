"""The log of a step history: fixed-size records with a checksum each, appended and never changed.

What was written outlives its writer. A record that was written in part ends the log.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from zeromon.storage.step_history.rows import ABSENT, COLUMNS, NAMES, SCALARS, VERSIONS, Row

BODIES = {
    b"ZMHIST\0" + bytes((version,)): struct.Struct(
        "<" + "".join(code for _, code in COLUMNS[:count])
    )
    for version, count in VERSIONS.items()
}
"""First bytes of a log -> layout of its records, without the checksum; the newest version last."""
MAGIC, BODY = list(BODIES.items())[-1]
_CRC = struct.Struct("<I")
_FIRST_SCALAR = NAMES.index(SCALARS[0])
RECORD_SIZE = BODY.size + _CRC.size


def pack(row: Row) -> bytes:
    """Returns the record of *row* with its checksum; NaN stands for a scalar that it does not have.

    A row with a number that its column cannot hold, as of a damaged ring, has no record: b"".
    """
    scalars = [math.nan if value is None else value for value in row[_FIRST_SCALAR:]]
    try:
        body = BODY.pack(*row[:_FIRST_SCALAR], *scalars)
    except struct.error:
        return b""
    return body + _CRC.pack(zlib.crc32(body))


def unpack(blob: bytes, body: struct.Struct = BODY) -> Iterator[Row]:
    """Yields the whole records at the beginning of *blob* and stops at the first broken one.

    Columns that records of an earlier format version lack are 0 or None.
    """
    size = body.size + _CRC.size
    missing = ABSENT[len(body.unpack(bytes(body.size))) :]
    for at in range(0, len(blob) - size + 1, size):
        record = blob[at : at + body.size]
        (crc,) = _CRC.unpack_from(blob, at + body.size)
        if zlib.crc32(record) != crc:
            return
        values = body.unpack(record) + missing
        scalars = (None if value != value else value for value in values[_FIRST_SCALAR:])
        yield (*values[:_FIRST_SCALAR], *scalars)


def segments(folder: Path) -> dict[int, Path]:
    """Returns the segments in *folder*: number -> file.

    A log that was converted and not yet removed is left out: its Parquet file has the same rows.
    """
    found: dict[int, Path] = {}
    for suffix in (".log", ".parquet"):
        for path in folder.glob(f"[0-9]*{suffix}"):
            if path.stem.isdigit():
                found[int(path.stem)] = path
    return dict(sorted(found.items()))


def read_log(path: Path) -> Iterator[Row]:
    """Yields the rows of a log up to the first broken one; nothing for a file that is no log."""
    body = record_layout(path)
    if body is not None:
        yield from unpack(path.read_bytes()[len(MAGIC) :], body)


def record_layout(log: Path) -> struct.Struct | None:
    """Returns the layout of the records of *log*; None for an unknown format."""
    with log.open("rb") as content:
        return BODIES.get(content.read(len(MAGIC)))
