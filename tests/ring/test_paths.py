"""Folders for rings, and names of runs."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from zeromon.base.errors import RingError
from zeromon.ring import paths


def test_folders_are_private_and_never_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0700, also when it was wider; a link is refused."""
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "z"))
    root = paths.choose_ring_root()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o777)
    assert stat.S_IMODE(paths.make_private_folder(root).stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(RingError):
        paths.make_private_folder(tmp_path / "link")
    with pytest.raises(RingError):
        paths.make_private_folder(Path("/proc/nothing/here"))


def test_a_folder_that_another_user_made_first_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody can make /dev/shm/zeromon-UID before the user does; the run goes elsewhere."""
    monkeypatch.delenv("ZEROMON_DIR", raising=False)
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shm, user = Path("/dev/shm/zeromon-4242"), 4242
    monkeypatch.setattr(os, "getuid", lambda: user)
    for squatted in (shm, tmp_path / "zeromon-4242"):
        squatted.mkdir()  # the tests run as another user than 4242
    try:
        assert paths.user_ring_roots() == [tmp_path / "store" / "live"]
        with pytest.raises(RingError, match="belongs to someone else"):
            paths.make_private_folder(shm)
    finally:
        shm.rmdir()


def test_without_a_home_and_without_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records go to the temporary folder, unless somebody else has it; rings go to /dev/shm."""
    for name in ("ZEROMON_DIR", "ZEROMON_STORE", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4242)  # of no user: there is no home to be found
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert paths.record_store_root() == tmp_path / "zeromon-4242" / "store"
    (tmp_path / "zeromon-4242").mkdir()  # of the user that the tests run as
    with pytest.raises(RingError, match="no folder for records"):
        paths.record_store_root()

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert paths.user_ring_roots() == [Path("/dev/shm/zeromon-4242")]


def test_run_ids_are_names_not_paths() -> None:
    """No slash, no dot in front."""
    assert paths.is_run_id("train_gpt-091500-abc")
    assert not any(map(paths.is_run_id, ("", "../x", "a/b", ".hidden", "a b", "x" * 99, "a\n")))
    assert paths.new_run_id(["torchrun", "--n", "2", "my train.py"]).startswith("my_train-")
    assert paths.new_run_id(["/usr/bin/deepspeed"]).startswith("deepspeed-")
