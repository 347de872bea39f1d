"""The sums of a rank since its step began. Pure.

Times are nanoseconds of CLOCK_MONOTONIC, sizes bytes.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from zeromon.ring.events import Phase, Raw
from zeromon.stats.intervals import intersection, length, union


def by_phase() -> list[int]:
    """Returns a zero for each phase."""
    return [0] * len(Phase)


class EndedPhase(NamedTuple):
    """A phase that has ended, and its time without the phases within it."""

    start_ns: int
    end_ns: int
    phase: Phase
    own_ns: int


class Window:
    """Sums since the step began."""

    __slots__ = (
        "allocated", "began_before", "blocked", "collectives", "ended", "late_ns", "launch_ns",
        "micro_steps", "nbytes", "offload_ns", "phase_exposed_ns", "phase_ns", "reserved", "rss",
        "samples", "scalars", "silent_ns", "spans", "stall_ns", "starved_ns", "timed", "tokens",
        "waited_only",
    )  # fmt: skip

    def __init__(self) -> None:
        self.spans: list[EndedPhase] = []
        """The outermost phases so far, in order."""
        self.ended: list[Raw] = []
        """The records of the collectives that have ended; of DDP, one that says what its reducer did."""
        self.blocked: list[Raw] = []
        """Those of them for which a caller was blocked."""
        self.phase_ns = by_phase()
        self.phase_exposed_ns = by_phase()
        self.collectives = self.timed = self.nbytes = 0
        self.waited_only = 0
        """Those of :attr:`timed` of which only the time that was waited for them is known."""
        self.stall_ns = self.offload_ns = self.late_ns = self.micro_steps = self.silent_ns = 0
        self.starved_ns = 0
        """In forwards and backwards that a device ended right behind the host."""
        self.launch_ns: list[int] = []
        """How long the host took for each phase, on a device."""
        self.allocated = self.reserved = self.rss = -1
        self.scalars: dict[str, float | None] = {}
        """Label of a scalar -> its value in the step; None where it is not finite."""
        self.samples = self.tokens = -1
        self.began_before = False
        """Whether a wait began before its own collective; else :attr:`blocked` is communication."""

    def follow(self, first: Window) -> None:
        """Adds the communication of *first*, the part of the same step before this one."""
        self.ended[:0], self.blocked[:0] = first.ended, first.blocked
        self.collectives += first.collectives
        self.timed += first.timed
        self.waited_only += first.waited_only
        self.stall_ns += first.stall_ns
        self.began_before |= first.began_before
        for phase, exposed in enumerate(first.phase_exposed_ns):
            self.phase_exposed_ns[phase] += exposed

    def communicated_ns(self) -> tuple[int, int]:
        """Returns how long communication was under way, and how long of that a caller was blocked.

        The first is -1 where it is not known.
        """
        if self.began_before:
            waits = union((record[1] - record[5], record[1]) for record in self.blocked)
            exposed = length(intersection(waits, union((r[4], r[1]) for r in self.ended)))
        else:
            exposed = _covered_ns(self.blocked, of_waits=True)
        under_way = -1 if self.waited_only else _covered_ns(self.ended, of_waits=False)
        return under_way, exposed + self.stall_ns


def _covered_ns(records: list[Raw], *, of_waits: bool) -> int:
    """The length of the union of what *records* of collectives last, or of their callers' waits."""
    ordered, until = records, -(1 << 63)
    for record in records:
        if record[1] < until:  # seldom: they are written as they end
            ordered = sorted(records, key=itemgetter(1))
            break
        until = record[1]
    total, begin = 0, ordered[-1][1] if ordered else 0
    for record in reversed(ordered):
        end = record[1]
        start = end - record[5] if of_waits else record[4]
        if end < begin:
            begin = end
        if start < begin:
            total += begin - start
            begin = start
    return total
