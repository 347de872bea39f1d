"""The history of a run on disk: one row a rank and step, kept through ``kill -9``, small for months.

``<run>/history/`` holds numbered segments. The newest is a log (``000007.log``) of fixed records with a
checksum each. A full log becomes Parquet (``000007.parquet``), and is then removed. When all segments
take more than a limit, the rows of the oldest are merged by sixteen, and by sixteen again: means of
times, maxima of bytes, and the number of steps in each row.
"""

from zeromon.snapshot.step import IDLE, NOT_TIMED, SKIPPED, UNTIMED
from zeromon.storage.step_history.queries import (
    LEAST,
    MEDIAN,
    MOST,
    by_step,
    collect_segment_rows,
    frame_of_steps,
    last_steps_before,
    ranges_of_steps,
    readable_segment_tables,
    series_of_steps,
    thin_series,
)
from zeromon.storage.step_history.rows import (
    ABSENT,
    COLUMNS,
    NAMES,
    RECORD_SIZE,
    Row,
    Series,
    pack_row,
    read_log,
    row_of,
    seg_files,
    step_of,
    unpack_rows,
)
from zeromon.storage.step_history.writer import (
    LIMIT_BYTES,
    SEGMENT_ROWS,
    Writer,
    damage_errors,
    merge_oldest,
    merge_rows,
    rows_frame,
)
