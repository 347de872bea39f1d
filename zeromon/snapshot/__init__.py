"""The state of a run at one moment: frozen data that every view reads.

Made by :mod:`zeromon.fold` from events. Nothing in this package changes state or reads a clock. Times
are nanoseconds of CLOCK_MONOTONIC, sizes bytes, ratios 0..1.
"""

from zeromon.snapshot.communication import CollectiveStatsRow, Hang
from zeromon.snapshot.finding import Finding, Severity
from zeromon.snapshot.memory import Pool, RiskCause
from zeromon.snapshot.rank import RankSnapshot
from zeromon.snapshot.run import RunSnapshot
from zeromon.snapshot.step import StepSummary
