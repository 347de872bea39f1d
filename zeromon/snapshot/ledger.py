"""The ledger: every second of a rank, or of a job, in one cause."""

from collections.abc import Iterable
from dataclasses import dataclass

from zeromon.ring.codes import TextEnum


class Cause(TextEnum):
    """A cause that time was spent on. The order is that of every ledger."""

    COMPUTE = "compute"
    """Forward, backward and optimizer, without what they waited for."""
    EXPOSED = "exposed"
    """Communication that nothing hid; of a dimension of the parallelism where one is known."""
    WAITING = "waiting"
    """The part of it in which a rank waited for another one to arrive."""
    DATA = "data"
    OFFLOAD = "offload"
    """The optimizer on the host, and waits for offloaded state to move."""
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    """Rollouts of an RL loop."""
    GARBAGE_COLLECTION = "garbage_collection"
    COMPILE = "compile"
    SET_UP = "set_up"
    """From the launch to the training loop, without what has a cause of its own."""
    STALL = "stall"
    """No progress since the last one, and no collective explains it."""
    HANG = "hang"
    """No progress since the last one, because of a collective that does not end."""
    OTHER = "other"
    """Python between the phases, and what no hook sees."""
    SHUT_DOWN = "shut_down"
    """From the last step to the end of the run, without what has a cause of its own."""
    DEAD = "dead"
    """From the end of a failed process to the next attempt, or to the end of the run."""
    LOST = "lost"
    """Steps that no checkpoint kept or that were taken again, and the step in which a process failed."""


_ORDER = {cause: number for number, cause in enumerate(Cause)}


_MIN_ROW_SECONDS = 1e-8
"""Min seconds of a row: less is the rounding of a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One cause."""

    cause: Cause
    of: str = ""
    """The object: a dimension, the rank that was waited for, a part of the set-up; or ""."""
    seconds: float


def sum_by_cause(rows: Iterable[LedgerRow]) -> tuple[LedgerRow, ...]:
    """*rows* with one row for each cause and what it is of, in the order of the causes."""
    sums: dict[tuple[Cause, str], float] = {}
    for row in rows:
        sums[row.cause, row.of] = sums.get((row.cause, row.of), 0.0) + row.seconds
    summed = [
        LedgerRow(cause=cause, of=of, seconds=seconds)
        for (cause, of), seconds in sums.items()
        if seconds > _MIN_ROW_SECONDS
    ]
    return tuple(sorted(summed, key=lambda row: (_ORDER[row.cause], -row.seconds, row.of)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityRow:
    """An activity of the training loop beside training: how often and for how long."""

    phase: str
    activity: str
    """The activity, where the phase may do several things: ``save`` or ``load``; else ""."""
    background: bool
    """On another thread: no step waited for it."""
    count: int
    seconds: float
    longest_seconds: float
    nbytes: int
    """Bytes that this rank saved or loaded; 0 where unknown."""
    last_ns: int
    """CLOCK_MONOTONIC of its last end."""
    file: int = 0
    """The largest file that was loaded whole, the same number on all ranks of a host; 0: unknown."""
    file_bytes: int = 0
