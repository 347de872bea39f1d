"""The messages that threads post to the application. Each handler is ``on_`` and the message's name."""

from dataclasses import dataclass
from typing import Literal

from textual.message import Message

from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.step import Lanes
from zeromon.sources.base import Output, Source
from zeromon.sources.live import LiveSource, runs_of_node
from zeromon.sources.replay import StoreSource
from zeromon.storage.run_store import Store
from zeromon.storage.step_history import Series
from zeromon.tui.line import clean
from zeromon.tui.playhead import Playhead, Span


@dataclass(frozen=True, slots=True)
class RunChoice:
    """One run of the list."""

    run: str
    state: str
    command: str
    address: str
    """``host:port`` of its collector; "" for a recorded run."""

    def open(self, store: Store) -> Source:
        """A source of the run's snapshots; raises ZeromonError for a record that is gone."""
        if self.address:
            return LiveSource(self.address, self.run)
        return StoreSource(self.run, store)


def list_run_choices(store: Store) -> tuple[RunChoice, ...]:
    """Live runs, then recorded ones."""
    live = [
        RunChoice(
            run.run, run.state, clean(" ".join(run.command)), run.address,
        )
        for run in runs_of_node()
    ]  # fmt: skip
    live_names = {choice.run for choice in live}
    recorded = [
        RunChoice(record.run, clean(record.verdict), clean(" ".join(record.command)), "")
        for record in store.list_manifests()
        if record.run not in live_names
    ]
    return (*live, *recorded)


@dataclass
class SnapshotArrived(Message):
    """A new snapshot. Only the newest matters: it replaces one that waits in the queue."""

    newest: RunSnapshot
    moment: RunSnapshot | None
    """The recorded snapshot that is shown instead of the newest one."""
    span: Span | None
    """The first and the last recorded moment."""
    series: Series | None
    """Steps of the whole run, where charts show it."""
    past: tuple[Finding, ...] | None
    """The findings in the record; None until they are read."""
    head: Playhead
    """Where it was read; the application drops messages about a run that it has left."""

    def can_replace(self, message: Message) -> bool:
        """Returns whether this message takes the place of *message* in the queue."""
        return isinstance(message, SnapshotArrived)


@dataclass
class SourceFailed(Message):
    """The source gave no snapshot; *reason* is for the user."""

    reason: str


@dataclass
class RunGone(Message):
    """The source no longer has the run; *reason* is for the user."""

    reason: str


@dataclass
class Announced(Message):
    """A text to show once in a corner of the screen."""

    text: str
    severity: Literal["information", "warning"] = "information"


@dataclass
class LanesArrived(Message):
    """The spans of the last steps; None with the reason why there are none."""

    lanes: Lanes | None
    trouble: str = ""


@dataclass
class OutputArrived(Message):
    """The end of the training's output; None with the reason why there is none."""

    output: Output | None
    trouble: str = ""


@dataclass
class Choices(Message):
    """The runs that the user can turn to."""

    runs: tuple[RunChoice, ...]
