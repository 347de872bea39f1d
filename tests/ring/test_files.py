"""The lock of a file: taken once, and no descriptor is lost where it cannot be taken."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from zeromon.ring.files import try_lock_file


def test_a_lock_that_is_held_is_not_taken_again(tmp_path: Path) -> None:
    first = try_lock_file(tmp_path / "lock")
    assert first is not None
    before = os.listdir("/proc/self/fd")
    assert try_lock_file(tmp_path / "lock") is None
    assert os.listdir("/proc/self/fd") == before
    os.close(first)


def test_a_file_system_without_locks_costs_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="locks"):
        try_lock_file(tmp_path / "lock")
    assert os.listdir("/proc/self/fd") == before
