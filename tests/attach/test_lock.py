"""One attach at a time to a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeromon.attach import loader
from zeromon.base.errors import AttachRefused


def test_who_is_refused_leaves_the_lock_of_the_first(tmp_path: Path) -> None:
    """Else a third would find none, and begin beside the first."""
    lock = tmp_path / "7.lock"
    with loader._locked_process(lock, 7):
        for _ in range(2):
            with (
                pytest.raises(AttachRefused, match="another zeromon is at process 7"),
                loader._locked_process(lock, 7),
            ):
                pass
    assert not lock.exists()
