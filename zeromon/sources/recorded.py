"""A run from its record in the run store."""

from collections.abc import Sequence

from zeromon.errors import CaptureRefused, SourceError
from zeromon.snapshot import RunSnapshot
from zeromon.sources.base import Output
from zeromon.sources.playback import Playback
from zeromon.storage.recorder import Past
from zeromon.storage.run_store import Store


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
