"""The history of a run on disk: one row a rank and step, kept through ``kill -9``, small for months.

``<run>/history/`` holds numbered segments. The newest is a log (``000007.log``) of fixed records with a
checksum each. A full log becomes Parquet (``000007.parquet``), and is then removed. When all segments
take more than a limit, the rows of the oldest are merged by sixteen, and by sixteen again: means of
times, maxima of bytes, and the number of steps in each row.
"""
