"""A collector's HTTP server over snapshots made by hand, and requests to it."""

from __future__ import annotations

import urllib.error
import urllib.request

from zeromon.ring.tokens import user_token
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.run import Health


class Fixed:
    """A view that never changes."""

    def __init__(self, *runs: RunSnapshot) -> None:
        self.view = runs
        self.health = Health(runs=1, ticks=5, busy_seconds=0.25, last_tick_wall=1000.5)
        self.reads = 0

    def was_read(self, _: str = "view") -> None:
        self.reads += 1


def bearer(token: str = "") -> dict[str, str]:
    """The header that brings *token*, by default that of this user."""
    return {"Authorization": f"Bearer {token or user_token()}"}


def get(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    """Asks with this user's token, unless *headers* have another one."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=bearer() | headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
