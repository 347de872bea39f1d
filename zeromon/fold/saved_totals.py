"""Totals with fields that may be unknown, which a checkpoint reads by their types.

A compiled module tells of such a type only that it is one, so this one is not compiled.
"""

from dataclasses import dataclass

from zeromon.ring.events import Precision


@dataclass(slots=True)
class EngineTotals:
    """Running totals of one DeepSpeed engine."""

    steps: int = 0
    skipped: int = 0
    collectives: int = 0
    nbytes: int = 0
    exposed_ns: int = 0
    precision: Precision | None = None
    nonfinite: int = 0


@dataclass(slots=True)
class PathTotals:
    """Running totals of one transfer path of offloaded state."""

    nbytes: int = 0
    busy_ns: int = 0
    blocked_ns: int = 0
    recent_bytes: float = 0.0
    recent_ns: float = 0.0
    best: float = 0.0
    """Highest rate, bytes per nanosecond."""
    of_step: int = 0
    """Bytes since the step began."""
    step_bytes: float | None = None
