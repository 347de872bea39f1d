"""What a rank's snapshot holds beside the fold of its events, and what must be known before it."""

from dataclasses import dataclass
from typing import NamedTuple

from zeromon.snapshot import (
    Device,
    DeviceMemory,
    Disk,
    ExtensionLock,
    Halt,
    HostMemory,
    Links,
    Pressure,
    RankCapture,
    Risk,
    StepSummary,
    TraceCheck,
    WorkerMemory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a rank's snapshot holds beside the fold of its events: probes, waits, risks."""

    alive: bool = True
    halted: Halt = Halt.NONE
    ended: str = ""
    failed: bool = False
    since_ns: int = 0
    """When its attempt began, CLOCK_MONOTONIC as the next two; 0: with its process."""
    until_ns: int = 0
    """When the account of its time ends; 0: with its last record."""
    died_ns: int = 0
    """When its process was first seen dead; 0 where that is not known."""
    host: HostMemory | None = None
    device: Device | None = None
    disk: Disk | None = None
    pressure: Pressure | None = None
    workers: WorkerMemory | None = None
    lock: ExtensionLock | None = None
    links: Links | None = None
    wait_seconds: float | None = None
    late_seconds: float | None = None
    risks: tuple[Risk, ...] = ()
    check: TraceCheck | None = None


NOTHING_OBSERVED = Observed()
"""A live rank of which no probe knows anything."""


class Vitals(NamedTuple):
    """The part of a rank's snapshot from which its risks, its end and its trace are concluded.

    The fields mean what those of :class:`~zeromon.snapshot.RankSnapshot` mean.
    """

    rank: int
    alive: bool
    ended: str
    failed: bool
    step_seconds: float | None
    recent: tuple[StepSummary, ...]
    memory: DeviceMemory | None
    rss_bytes: int
    host_available_bytes: int
    host: HostMemory | None
    capture: RankCapture | None
