"""Every message of the app."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from textual.message import Message

from zeromon.snapshot import RunSnapshot


@dataclass
class SnapshotArrived(Message):
    """A new picture. Only the newest matters, so a waiting older one is replaced."""

    run: RunSnapshot

    def can_replace(self, message: Message) -> bool:
        """A newer picture takes an older one's place in the queue."""
        return isinstance(message, SnapshotArrived)


@dataclass
class SourceFailed(Message):
    """The source gave no picture; *reason* is for the user."""

    reason: str


@dataclass
class Told(Message):
    """Something that the user should read once."""

    text: str
    severity: Literal["information", "warning"]
