"""The log of a step history: fixed-size records with a checksum each, appended and never changed.

What was written outlives its writer. A record that was written in part ends the log.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from zeromon.storage.step_history.rows import COLUMNS, NAMES, SCALARS, Row

MAGIC = b"ZMHIST\0\6"
BODY = struct.Struct("<" + "".join(code for _, code in COLUMNS))
"""Layout of a record, without its checksum."""
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


def unpack(blob: bytes) -> Iterator[Row]:
    """Yields the whole records at the beginning of *blob* and stops at the first broken one."""
    for at in range(0, len(blob) - RECORD_SIZE + 1, RECORD_SIZE):
        record = blob[at : at + BODY.size]
        (crc,) = _CRC.unpack_from(blob, at + BODY.size)
        if zlib.crc32(record) != crc:
            return
        values = BODY.unpack(record)
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
    content = path.read_bytes()
    if content.startswith(MAGIC):
        yield from unpack(content[len(MAGIC) :])
