"""What the account of a rank's time and its pause depend on beside the fold of its events."""

from dataclasses import dataclass

from zeromon.snapshot import ExtensionLock, Halt, HostMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Facts about a rank's process, seen from outside it."""

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
    lock: ExtensionLock | None = None


NOTHING_OBSERVED = Observed()
"""A live rank of which no probe knows anything."""
