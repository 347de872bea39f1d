"""The history of a run on disk: one row a rank and step, kept through ``kill -9``, small for months.

``<run>/history/`` holds numbered segments. The newest is a log (``000007.log``) of fixed records with a
checksum each. A full log becomes Parquet (``000007.parquet``), and is then removed. When all segments
take more than a limit, the rows of the oldest are merged by sixteen, and by sixteen again: means of
times, maxima of bytes, and the number of steps in each row.
"""

from zeromon.snapshot.step import IDLE, NOT_TIMED, SKIPPED, UNTIMED
from zeromon.storage.step_history.parquet import frame, merged, shrink, unreadable
from zeromon.storage.step_history.queries import (
    LEAST,
    MEDIAN,
    MOST,
    by_step,
    collect,
    last_steps,
    load,
    pieces,
    series,
    step_ranges,
    steps,
    thinned,
)
from zeromon.storage.step_history.rows import (
    ABSENT,
    COLUMNS,
    NAMES,
    RECORD_SIZE,
    Row,
    Series,
    pack,
    read_log,
    row_of,
    segments,
    step_of,
    unpack,
)
from zeromon.storage.step_history.writer import LIMIT_BYTES, SEGMENT_ROWS, Writer
