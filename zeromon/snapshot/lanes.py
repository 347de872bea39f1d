"""The last steps of each rank as spans on one timeline. Made by :mod:`zeromon.fold.lanes`."""

from dataclasses import dataclass
from enum import Enum


class Stream(str, Enum):
    """The resource of a span. BACKGROUND: a thread beside the training, which no step waits for."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpan:
    """A phase, or a collective from its issue to its end."""

    rank: int
    step: int
    stream: Stream
    name: str
    unit: str
    """Fully qualified name, or the bucket; empty where no unit is known."""
    group: str
    begin_ns: int
    end_ns: int
    exposed_ns: int
    """How long the rank was blocked, up to the end."""
    nbytes: int
    on_device: bool
    """The device's stream was blocked, and not the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStep:
    """A step of a rank; ``unplaced_ns`` and ``untimed`` are what its spans do not show."""

    rank: int
    step: int
    begin_ns: int
    end_ns: int
    unplaced_ns: int
    """Exposed time whose moment is not known."""
    untimed: int
    """Collectives whose time is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateArrival:
    """A collective that the other ranks of its group waited for *rank* to issue."""

    name: str
    unit: str
    group: str
    step: int
    rank: int
    """Who came last."""
    first_rank: int
    at_ns: int
    first_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """One timeline; times are nanoseconds of the common clock."""

    zero_ns: int
    """When the first shown step began."""
    steps: tuple[LaneStep, ...]
    spans: tuple[LaneSpan, ...]
    arrivals: tuple[LateArrival, ...]
    left_out: tuple[str, ...]
    """Sentences that say what a limit left out."""
