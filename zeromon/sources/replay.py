"""Runs from their records in the run store, as they ended or as a replay that plays."""

import time
from collections.abc import Callable, Sequence

from zeromon.base.errors import CaptureRefused, RunNotFound, SourceError
from zeromon.snapshot import RunSnapshot
from zeromon.sources.base import Output, Playback, Source
from zeromon.sources.live import runs_of_node
from zeromon.storage.run_store import Store
from zeromon.storage.snapshot_log import Past


class StoreSource(Past):
    """The record of a run; its newest snapshot is the last one that was written."""

    live = False
    relocatable = True
    playback: Playback | None = None

    def __init__(self, run: str | None = None, store: Store | None = None) -> None:
        self._store = store or Store()
        self.run = self._store.resolve(run)
        super().__init__(self._store.folder(self.run))

    def latest(self) -> RunSnapshot:
        """Reads the last snapshot of the record."""
        return self._store.load(self.run)

    def output(self, pid: int) -> Output:  # noqa: ARG002
        """Refuses."""
        raise SourceError("a record has no output of the training")

    def trace(self, steps: int, ranks: Sequence[int] = ()) -> int:  # noqa: ARG002
        """Refuses: a record has no process that could be traced."""
        raise CaptureRefused(f"run {self.run} is not live", "A trace needs a live run.")

    def request_detail(self, ranks: Sequence[int] = (), node: str = "") -> None:
        """Does nothing: a record has every rank."""


def reopen_run_source(run: str, is_gone: bool) -> Source | None:
    """A new source of *run*: a collector that follows it, else, if *is_gone*, its record; or None."""
    for live_run in runs_of_node():
        if live_run.run == run:
            return live_run.open()
    return StoreSource(run) if is_gone and run in Store().names() else None


class ReplaySource(StoreSource):
    """A recorded run, from its first moment to its last; raises RunNotFound for one without moments."""

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
        pos = self.playback.position
        if pos >= self.playback.end:
            return super().latest()
        if self._shown is None or not self._shown[0] <= pos < self._shown[1]:
            snapshot = self.at(pos)
            later = min((t for t in self.snapshot_times() if t > pos), default=self.playback.end)
            self._shown = (snapshot.taken_wall, later, snapshot)
        return self._shown[2]
