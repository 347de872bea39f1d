"""What is looked at: now, a moment of a run's history, or a replay. One set of verbs for all.

Set from the keys, read by the thread that asks the source; every change is one assignment.
"""

from __future__ import annotations

from zeromon.replay import SPEEDS, ReplaySource
from zeromon.snapshot import RunSnapshot
from zeromon.source import Source

_STRIDES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
_STRIDES_A_SPAN = 60

Span = tuple[float, float]


def stride(span: Span | None) -> float:
    """Seconds that one key press moves: a sixtieth of what is kept, rounded."""
    whole = 0.0 if span is None else span[1] - span[0]
    return next((s for s in _STRIDES if s >= whole / _STRIDES_A_SPAN), _STRIDES[-1])


class Playhead:
    """Where in a source the view is. *wall* is None while it follows the newest picture."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.wall: float | None = None

    @property
    def replay(self) -> ReplaySource | None:
        """The source, where it goes by itself."""
        return self.source if isinstance(self.source, ReplaySource) else None

    @property
    def paused(self) -> bool:
        """Whether the picture stands."""
        return not self.replay.playing if self.replay else self.wall is not None

    @property
    def speed(self) -> float:
        """Seconds of the run a second."""
        return self.replay.speed if self.replay else 1.0

    def look(self) -> tuple[RunSnapshot, RunSnapshot | None]:
        """The newest picture, and the kept one that is looked at instead; raises ZeromonError."""
        wall = self.wall
        return self.source.latest(), None if wall is None else self.source.at(wall)

    def toggle(self, shown: float) -> None:
        """Holds what is shown (of moment *shown*), or goes on."""
        if self.replay is None:
            self.wall = shown if self.wall is None else None
        elif self.replay.playing:
            self.replay.pause()
        else:
            self.replay.play()

    def move(self, shown: float, seconds: float, span: Span | None) -> bool:
        """Goes *seconds* from the moment *shown*; False where nothing is kept.

        Beyond the end of a live run is now.
        """
        if span is None:
            return False
        goal = max(span[0], shown + seconds)
        if self.replay is not None:
            self.replay.seek(min(goal, span[1]))
        else:
            self.wall = None if goal > span[1] else goal
        return True

    def follow(self) -> None:
        """Goes to the newest picture, or to the end of a replay."""
        if self.replay is not None:
            self.replay.seek(self.replay.end)
        else:
            self.wall = None

    def faster(self, by: int) -> bool:
        """The next speed up or down; False for what does not go by itself."""
        if self.replay is None:
            return False
        near = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed))
        speed = SPEEDS[min(len(SPEEDS) - 1, max(0, near + by))]
        if self.replay.playing:
            self.replay.play(speed)
        else:
            self.replay.speed = speed
        return True
