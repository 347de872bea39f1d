"""Sums of the calls of a schedule on one rank: the actions in their order, and their times."""

from collections import deque
from dataclasses import dataclass, field

from zeromon.ring.events import StageAction
from zeromon.stats.pipeline import Act

_CALLS = 10


@dataclass(slots=True)
class PipelineCall:
    """One call of a schedule: all micro-batches of a batch."""

    order: list[Act] = field(default_factory=list)
    spent_ns: dict[tuple[int, StageAction], list[int]] = field(default_factory=dict)
    """(stage, action) -> how often, nanoseconds."""
    waited_ns: dict[tuple[int, int], int] = field(default_factory=dict)
    """(stage, micro-batch) -> nanoseconds blocked in sends and receives before an action of it."""
    first_ns: int = 0
    last_ns: int = 0
    busy_ns: int = 0

    @property
    def span_ns(self) -> int:
        """From the start of the first action to the end of the last."""
        return self.last_ns - self.first_ns


@dataclass(slots=True)
class PipelineCalls:
    """The last calls of a rank, and the one under way."""

    last: deque[PipelineCall] = field(default_factory=lambda: deque(maxlen=_CALLS))
    now: PipelineCall = field(default_factory=PipelineCall)
    schedule: int = 0
    """Number of the schedule of *last*."""
    waited_ns: int = 0
    """Blocked in sends and receives since the last action."""
