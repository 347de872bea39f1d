"""Which snapshot the view shows: the newest, a recorded one, or that of a replay.

The keys change it and the thread that reads snapshots reads it; every change is one assignment.
"""

from zeromon.snapshot import RunSnapshot
from zeromon.sources.base import SPEEDS, Playback, Source

_STRIDES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
_STRIDES_A_SPAN = 60

Span = tuple[float, float]


def seconds_per_stride(span: Span | None) -> float:
    """Seconds that one key press moves: a sixtieth of the record, rounded up."""
    span_seconds = 0.0 if span is None else span[1] - span[0]
    return next((s for s in _STRIDES if s >= span_seconds / _STRIDES_A_SPAN), _STRIDES[-1])


class Playhead:
    """Where the view is in a source. *wall* is None while the view follows the newest snapshot."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.wall: float | None = None

    @property
    def replay(self) -> Playback | None:
        """The clock of a replay; None for a source whose snapshots are of now."""
        return self.source.playback

    @property
    def paused(self) -> bool:
        """True if the view stays at one snapshot."""
        return not self.replay.playing if self.replay else self.wall is not None

    @property
    def speed(self) -> float:
        """Seconds of the run per second."""
        return self.replay.speed if self.replay else 1.0

    def look(self) -> tuple[RunSnapshot, RunSnapshot | None]:
        """The newest snapshot, and the recorded one at *wall*; raises ZeromonError."""
        shown_wall = self.wall
        return self.source.latest(), None if shown_wall is None else self.source.at(shown_wall)

    def toggle_pause(self, shown_wall: float) -> None:
        """Holds the snapshot of the moment *shown_wall*, or follows the newest one again."""
        if self.replay is None:
            self.wall = shown_wall if self.wall is None else None
        elif self.replay.playing:
            self.replay.pause()
        else:
            self.replay.play()

    def move(self, shown_wall: float, seconds: float, span: Span | None) -> bool:
        """Moves *seconds* from the moment *shown_wall*; False for a run without a record.

        Beyond the end of a live run, the view follows the newest snapshot.
        """
        if span is None:
            return False
        goal = max(span[0], shown_wall + seconds)
        if self.replay is not None:
            self.replay.seek(min(goal, span[1]))
        else:
            self.wall = None if goal > span[1] else goal
        return True

    def follow(self) -> None:
        """Follows the newest snapshot, or goes to the end of a replay."""
        if self.replay is not None:
            self.replay.seek(self.replay.end)
        else:
            self.wall = None

    def change_replay_speed(self, by: int) -> bool:
        """Chooses the next speed up or down; False for a source that is no replay."""
        if self.replay is None:
            return False
        index = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed))
        speed = SPEEDS[min(len(SPEEDS) - 1, max(0, index + by))]
        if self.replay.playing:
            self.replay.play(speed)
        else:
            self.replay.speed = speed
        return True
