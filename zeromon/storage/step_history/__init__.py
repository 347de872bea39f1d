"""The history of a run on disk: one row a rank and step, kept through ``kill -9``, small for months.

``<run>/history/`` holds numbered segments. The newest is a log (``000007.log``) of fixed records with a
checksum each. A full log becomes Parquet (``000007.parquet``), and is then removed. When all segments
take more than a limit, the rows of the oldest are merged by sixteen, and by sixteen again: means of
times, maxima of bytes, and the number of steps in each row.
"""

from zeromon.snapshot.step import (
    IDLE as IDLE,
    NOT_TIMED as NOT_TIMED,
    SKIPPED as SKIPPED,
    UNTIMED as UNTIMED,
)
from zeromon.storage.step_history.log import (
    RECORD_SIZE as RECORD_SIZE,
    pack as pack,
    read_log as read_log,
    segments as segments,
    unpack as unpack,
)
from zeromon.storage.step_history.parquet import frame as frame, merged as merged, shrink as shrink
from zeromon.storage.step_history.queries import (
    LEAST as LEAST,
    MEDIAN as MEDIAN,
    MOST as MOST,
    by_step as by_step,
    collect as collect,
    last_steps as last_steps,
    load as load,
    pieces as pieces,
    series as series,
    step_ranges as step_ranges,
    steps as steps,
)
from zeromon.storage.step_history.rows import (
    ABSENT as ABSENT,
    COLUMNS as COLUMNS,
    NAMES as NAMES,
    Row as Row,
    Series as Series,
    row_of as row_of,
    step_of as step_of,
)
from zeromon.storage.step_history.writer import (
    LIMIT_BYTES as LIMIT_BYTES,
    SEGMENT_ROWS as SEGMENT_ROWS,
    Writer as Writer,
)
