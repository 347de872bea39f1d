"""A recorded run plays: a source whose newest picture is that at a playhead."""

from __future__ import annotations

import time
from collections.abc import Callable

from zeromon.errors import RunNotFound
from zeromon.snapshot import RunSnapshot
from zeromon.source import StoreSource
from zeromon.store import Store

SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Seconds of the run a second, as the views offer them."""


class ReplaySource(StoreSource):
    """A recorded run, from its first moment to its last; at the end it stands."""

    def __init__(
        self,
        run: str | None = None,
        store: Store | None = None,
        *,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(run, store)
        span = self.span()
        if span is None:
            raise RunNotFound(
                f"nothing was kept of how {self.run} was before its end",
                "zeromon report shows how it ended.",
            )
        self.begin, self.end = span
        self.speed = speed
        self.playing = True
        self._clock = clock
        self._anchor = (clock(), self.begin)
        """A reading of the clock, and the moment of the run that belongs to it."""
        self._shown: tuple[float, float, RunSnapshot] | None = None
        """Between which moments a picture is the newest, and the picture."""

    @property
    def position(self) -> float:
        """The moment that is shown, seconds since the epoch."""
        then, wall = self._anchor
        if self.playing:
            wall += (self._clock() - then) * self.speed
        return min(max(wall, self.begin), self.end)

    def play(self, speed: float | None = None) -> None:
        """Goes on, at *speed* seconds of the run a second."""
        self._hold()
        self.speed = self.speed if speed is None else speed
        self.playing = True

    def pause(self) -> None:
        """Stands still."""
        self._hold()
        self.playing = False

    def seek(self, wall: float) -> None:
        """Goes to a moment of the run."""
        self._anchor = (self._clock(), wall)

    def _hold(self) -> None:
        self._anchor = (self._clock(), self.position)

    def latest(self) -> RunSnapshot:
        """The picture at the playhead; at the very end the last one, which says how it ended."""
        now = self.position
        if now >= self.end:
            return super().latest()
        if self._shown is None or not self._shown[0] <= now < self._shown[1]:
            picture = self.at(now)
            self._shown = (picture.taken_wall, self._next_after(now), picture)
        return self._shown[2]

    def _next_after(self, wall: float) -> float:
        """When the picture changes."""
        return min((known for known in self.walls() if known > wall), default=self.end)
