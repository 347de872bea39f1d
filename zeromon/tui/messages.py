"""Every message of the app that comes from a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from textual.message import Message

from zeromon.history import Series
from zeromon.record import KnownFinding
from zeromon.snapshot import RunSnapshot

if TYPE_CHECKING:
    from zeromon.tui.playhead import Playhead, Span


@dataclass
class Arrived(Message):
    """A new picture. Only the newest matters, so a waiting older one is replaced."""

    newest: RunSnapshot
    moment: RunSnapshot | None
    """The kept one that is looked at instead."""
    span: Span | None
    """What is kept."""
    series: Series | None
    """Steps of the whole run, where they are wanted."""
    past: tuple[KnownFinding, ...] | None
    """Findings that the record knows of; None while they are not read."""
    head: Playhead
    """Whose it is: one of a run that was left is dropped."""

    def can_replace(self, message: Message) -> bool:
        """A newer picture takes an older one's place in the queue."""
        return isinstance(message, Arrived)


@dataclass
class SourceFailed(Message):
    """The source gave no picture; *reason* is for the user."""

    reason: str


@dataclass
class RunGone(Message):
    """The source does not have the run any more."""

    reason: str


@dataclass
class Told(Message):
    """Something that the user should read once."""

    text: str
    severity: Literal["information", "warning"] = "information"


@dataclass
class Choices(Message):
    """The runs that can be looked at."""

    runs: tuple[RunChoice, ...]


@dataclass(frozen=True, slots=True)
class RunChoice:
    """A run that can be looked at."""

    run: str
    state: str
    command: str
    address: str
    """Of its collector; "" for one that is only in the store."""
