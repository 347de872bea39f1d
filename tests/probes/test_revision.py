"""The git commit of a run's script, with the real git."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from zeromon.probes.process import REVISION, Revision


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=one", "-c", "user.email=one@example.org")
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("pass")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    return folder


def answer(revision: Revision, folder: Path) -> str:
    deadline = time.monotonic() + 60
    while not (found := revision.of(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_the_commit_is_that_of_the_start(code: Path, tmp_path: Path) -> None:
    first = git(code, "rev-parse", "HEAD")
    git(code, "tag", "-a", "v1", "-m", "v1")  # a tag's name is no commit
    assert answer(Revision(tmp_path), code) == first
    (code / "train.py").write_text("changed")
    git(code, "commit", "-qam", "two")
    assert Revision(tmp_path).of(str(code)) == first, "another collector takes the kept one"


def test_changes_are_told(code: Path, tmp_path: Path) -> None:
    (code / "train.py").write_text("changed")
    assert answer(Revision(tmp_path), code) == git(code, "rev-parse", "HEAD") + "-dirty"


def test_no_git_and_a_broken_record_are_unknown(tmp_path: Path) -> None:
    (tmp_path / REVISION).write_bytes(b"\xff$(rm -rf)")
    one = Revision(tmp_path)
    assert one.of(str(tmp_path / "absent")) == ""
    assert one.of("") == ""
