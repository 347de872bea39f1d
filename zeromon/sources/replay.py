"""A recorded run that plays: the newest snapshot is that at the playback's position."""

import time
from collections.abc import Callable

from zeromon.errors import RunNotFound
from zeromon.snapshot import RunSnapshot
from zeromon.sources.playback import Playback
from zeromon.sources.recorded import StoreSource
from zeromon.storage.run_store import Store


class ReplaySource(StoreSource):
    """A recorded run, from its first moment to its last.

    Raises :class:`~zeromon.errors.RunNotFound` for a record without moments.
    """

    relocatable = False
    playback: Playback

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
                f"the record of {self.run} has no snapshots from before its end",
                "zeromon report shows how it ended.",
            )
        self.playback = Playback(*span, speed, clock)
        self._shown: tuple[float, float, RunSnapshot] | None = None
        """Between which moments a snapshot is the newest, and the snapshot."""

    def latest(self) -> RunSnapshot:
        """The snapshot at the position; at the very end the last one, which says how the run ended."""
        now = self.playback.position
        if now >= self.playback.end:
            return super().latest()
        if self._shown is None or not self._shown[0] <= now < self._shown[1]:
            snapshot = self.at(now)
            after = min((wall for wall in self.walls() if wall > now), default=self.playback.end)
            self._shown = (snapshot.taken_wall, after, snapshot)
        return self._shown[2]
