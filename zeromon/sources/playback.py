"""The clock of a replay: which moment of a recorded run is shown."""

import time
from collections.abc import Callable

SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Seconds of the run per second, as the views offer them."""


class Playback:
    """Moves from *begin* to *end*, seconds since the epoch, and stops there."""

    def __init__(
        self,
        begin: float,
        end: float,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.begin, self.end = begin, end
        self.speed = speed
        """Seconds of the run per second."""
        self.playing = True
        self._clock = clock
        self._anchor = (clock(), begin)
        """A reading of the clock, and the moment of the run that belongs to it."""

    @property
    def position(self) -> float:
        """The moment that is shown, seconds since the epoch."""
        then, wall = self._anchor
        if self.playing:
            wall += (self._clock() - then) * self.speed
        return min(max(wall, self.begin), self.end)

    def play(self, speed: float | None = None) -> None:
        """Continues, at *speed* seconds of the run per second where one is given."""
        self._hold()
        self.speed = self.speed if speed is None else speed
        self.playing = True

    def pause(self) -> None:
        """Stops at the moment that is shown."""
        self._hold()
        self.playing = False

    def seek(self, wall: float) -> None:
        """Moves to *wall*, seconds since the epoch."""
        self._anchor = (self._clock(), wall)

    def _hold(self) -> None:
        self._anchor = (self._clock(), self.position)
