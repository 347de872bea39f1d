"""The history of a run on disk: one row a rank and step, kept through ``kill -9``, small for months.

``<run>/history/`` holds numbered segments. The newest is a log (``000007.log``) of fixed records with a
checksum each. A full log becomes Parquet (``000007.parquet``), and is then removed. When all segments
take more than a limit, the rows of the oldest are merged by sixteen, and by sixteen again: means of
times, maxima of bytes, and the number of steps in each row.
"""

from zeromon.snapshot.step import IDLE as IDLE
from zeromon.snapshot.step import NOT_TIMED as NOT_TIMED
from zeromon.snapshot.step import SKIPPED as SKIPPED
from zeromon.snapshot.step import UNTIMED as UNTIMED
from zeromon.storage.step_history.log import RECORD_SIZE as RECORD_SIZE
from zeromon.storage.step_history.log import pack as pack
from zeromon.storage.step_history.log import read_log as read_log
from zeromon.storage.step_history.log import segments as segments
from zeromon.storage.step_history.log import unpack as unpack
from zeromon.storage.step_history.parquet import frame as frame
from zeromon.storage.step_history.parquet import merged as merged
from zeromon.storage.step_history.parquet import shrink as shrink
from zeromon.storage.step_history.queries import LEAST as LEAST
from zeromon.storage.step_history.queries import MEDIAN as MEDIAN
from zeromon.storage.step_history.queries import MOST as MOST
from zeromon.storage.step_history.queries import by_step as by_step
from zeromon.storage.step_history.queries import collect as collect
from zeromon.storage.step_history.queries import last_steps as last_steps
from zeromon.storage.step_history.queries import load as load
from zeromon.storage.step_history.queries import pieces as pieces
from zeromon.storage.step_history.queries import series as series
from zeromon.storage.step_history.queries import step_ranges as step_ranges
from zeromon.storage.step_history.queries import steps as steps
from zeromon.storage.step_history.rows import ABSENT as ABSENT
from zeromon.storage.step_history.rows import COLUMNS as COLUMNS
from zeromon.storage.step_history.rows import NAMES as NAMES
from zeromon.storage.step_history.rows import Row as Row
from zeromon.storage.step_history.rows import Series as Series
from zeromon.storage.step_history.rows import row_of as row_of
from zeromon.storage.step_history.rows import step_of as step_of
from zeromon.storage.step_history.writer import LIMIT_BYTES as LIMIT_BYTES
from zeromon.storage.step_history.writer import SEGMENT_ROWS as SEGMENT_ROWS
from zeromon.storage.step_history.writer import Writer as Writer
