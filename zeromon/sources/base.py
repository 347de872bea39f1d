"""The interface of the place that a view's snapshots come from: the protocol :class:`Source`.

Implemented by :class:`~zeromon.sources.live.LiveSource` (a collector),
:class:`~zeromon.sources.replay.StoreSource` (a record), :class:`~zeromon.sources.replay.ReplaySource`
(a record that plays) and :class:`~zeromon.sources.prometheus.source.PrometheusSource`. A view
never tests which of them it has: what they can do differently is a member of the protocol.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.step import Lanes
from zeromon.storage.run_store import WHOLE_RUN, StepQuery
from zeromon.storage.step_history.rows import Series

SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Seconds of the run per second, as the views offer them."""


class Playback:
    """Moves from *begin_wall* to *end_wall*, seconds since the epoch, and stops there."""

    def __init__(
        self,
        begin_wall: float,
        end_wall: float,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.begin, self.end = begin_wall, end_wall
        self.speed = speed
        """Seconds of the run per second."""
        self.playing = True
        self._clock = clock
        self._anchor = (clock(), begin_wall)
        """A reading of the clock, and the moment of the run that belongs to it."""

    @property
    def position(self) -> float:
        """The moment that is shown, seconds since the epoch."""
        anchored_at, wall_time = self._anchor
        if self.playing:
            wall_time += (self._clock() - anchored_at) * self.speed
        return min(max(wall_time, self.begin), self.end)

    def play(self, speed: float | None = None) -> None:
        """Continues, at *speed* seconds of the run per second where one is given."""
        self._set_anchor()
        self.speed = self.speed if speed is None else speed
        self.playing = True

    def pause(self) -> None:
        """Stops at the moment that is shown."""
        self._set_anchor()
        self.playing = False

    def seek(self, wall_time: float) -> None:
        """Moves to *wall_time*, seconds since the epoch."""
        self._anchor = (self._clock(), wall_time)

    def _set_anchor(self) -> None:
        self._anchor = (self._clock(), self.position)


class Output(NamedTuple):
    """The end of what a process has written to its standard output."""

    path: str
    """The file."""
    lines: tuple[str, ...]


def sample_snapshots(source: "Source", count: int) -> Iterator[RunSnapshot]:
    """Yields *count* recorded snapshots, evenly over the time of the run; nothing without a record."""
    first_wall, last_wall = source.span() or (0.0, 0.0)
    for n in range(count if last_wall else 0):
        yield source.at(first_wall + (last_wall - first_wall) * n / (count - 1))


class Source(Protocol):
    """The snapshots of one run, now and before. Every method may raise ``ZeromonError``."""

    @property
    def run(self) -> str:
        """The run's name."""

    @property
    def live(self) -> bool:
        """True if something observes the run: its newest snapshot changes until the run ends."""

    @property
    def relocatable(self) -> bool:
        """True if a view that lost this source may open the run elsewhere: a new port, or its record."""

    @property
    def playback(self) -> Playback | None:
        """The clock of a replay, which can be paused and moved; None where snapshots are of now."""

    def latest(self) -> RunSnapshot:
        """The newest snapshot."""

    def span(self) -> tuple[float, float] | None:
        """The first and the last recorded moment, seconds since the epoch; None without a record."""

    def at(self, wall_time: float) -> RunSnapshot:
        """The snapshot at *wall_time*, seconds since the epoch, or the nearest before it."""

    def series(self, query: StepQuery = WHOLE_RUN) -> Series:
        """The steps of the run as columns, of ``series_of_steps`` of step_history."""

    def findings(self) -> list[Finding]:
        """Every finding of the run; see :func:`zeromon.storage.snapshot_log.findings_of_record`."""

    def lanes(self, steps: int, ranks: Sequence[int] = ()) -> Lanes:
        """The last *steps* steps of *ranks* as spans on one timeline; (): all ranks."""

    def output(self, pid: int) -> Output:
        """The end of what the process of a rank has written to its standard output."""

    def trace(self, steps: int, ranks: Sequence[int] = ()) -> int:
        """Requests a trace of the next *steps* and returns its number; raises ``CaptureRefused``."""

    def request_detail(self, ranks: Sequence[int] = (), node: str = "") -> None:
        """Makes the next snapshots contain these *ranks*, and all of the collector at address *node*.

        Does nothing where every snapshot contains all ranks.
        """
