"""What NCCL itself says: its profiler plugin Inspector of collectives, its service RAS of communicators.

Both count the collectives of one operation in one communicator, from its creation on.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorRow:
    """One operation of a rank in one communicator: means of Inspector's last records."""

    communicator: str
    """NCCL's hash of it."""
    group_id: str
    """The process group that it belongs to; "" where none or several have these members."""
    group: str
    size: int
    place: int
    """The rank's number in the communicator."""
    op: str
    number: int
    """NCCL's number of the newest collective."""
    nbytes: int
    """Of the newest."""
    records: int
    """How many the means are of. Inspector writes a sample, not every collective."""
    seconds: float
    busbw_bytes_per_second: float
    timing: str
    """``kernel_gpu``: by the clock of the device; ``kernel_cpu``, ``collective_cpu``: by the host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RasCount:
    """How often the ranks of a communicator have launched an operation."""

    op: str
    most: int
    behind: tuple[tuple[int, int], ...]
    """(place in the communicator, count) of those that have launched fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RasCommunicator:
    """A communicator that has launched collectives, or of which ranks do not answer."""

    communicator: str
    group_id: str
    """As in :class:`InspectorRow`."""
    size: int
    counts: tuple[RasCount, ...]
    unresponsive: tuple[int, ...]
    """Places of ranks that RAS cannot reach, of which *dead* are given up."""
    dead: tuple[int, ...]
    failed: tuple[int, ...]
    """Places of ranks in which NCCL has met an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ras:
    """NCCL's answer about the whole job, asked for while a collective hangs."""

    note: str
    """Why there is none; "" where there is one."""
    communicators: tuple[RasCommunicator, ...] = ()
