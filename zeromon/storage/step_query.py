"""Which steps of a run a time series contains."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepQuery:
    """A range of time or of steps, some ranks, and a number of points."""

    since_us: int = 0
    """Steps that began at or after this moment, microseconds since the epoch."""
    until_us: int | None = None
    """Steps that began before this moment; None: no end."""
    ranks: tuple[int, ...] = ()
    """Only these ranks; (): all."""
    most: int = 600
    """About how many points of each rank."""
    steps: tuple[int, int] | None = None
    """Only these steps, the first and the last one; None: all."""


WHOLE_RUN = StepQuery()
"""All steps of all ranks."""
