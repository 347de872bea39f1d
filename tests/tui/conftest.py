"""One time zone, so that snapshots are the same everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def utc() -> Iterator[None]:
    """Clocks on the screen show UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own preferences do not count."""
    for name in ("NO_COLOR", "ZEROMON_THEME", "TEXTUAL_DRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
