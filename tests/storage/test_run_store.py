"""The store of ended runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import device_memory, rank, run

from zeromon.errors import RingError, RunAmbiguous, RunNotFound, ZeromonError
from zeromon.storage.recorder import Record
from zeromon.storage.run_store import About, Store, decode, encode


def test_a_picture_survives_json() -> None:
    """Field by field."""
    snapshot = run(rank(0, memory=device_memory()), rank(1))
    assert decode(encode(snapshot)) == snapshot


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"run": 3}', b"\xff\xfe"])
def test_a_broken_record_is_a_clear_error(text: bytes) -> None:
    """With a hint, never a traceback of msgspec."""
    with pytest.raises(ZeromonError) as caught:
        decode(text)
    assert caught.value.hint


def test_the_store_finds_runs_by_name_prefix_and_age(tmp_path: Path) -> None:
    """The newest by default."""
    store = Store(tmp_path)
    with pytest.raises(RunNotFound):
        store.load()
    for name in ("train-a", "train-b", "other"):
        store.save(run(rank(0), run=name))
    assert store.load().run == "other"
    assert store.load("train-a").run == "train-a"
    with pytest.raises(RunAmbiguous):
        store.load("train")
    with pytest.raises(RunNotFound):
        store.load("nope")
    store.prune(keep=1)
    assert store.names() == ["other"]
    assert (tmp_path / "runs" / "other").stat().st_mode & 0o077 == 0


# ---- who may write ------------------------------------------------------------------------------

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_the_store_and_all_that_is_made_for_it_is_private(tmp_path: Path) -> None:
    """Under any umask, its parents too: another user could put an own folder in the place of a run."""
    store = Store(tmp_path / "state" / "of" / "zeromon")
    store.save(run(rank(0), run="r"))
    store.keep_ring("r", "rank0.1.ring", memoryview(b"ring"))
    record = Record(store.folder("r"))
    record.see(run(rank(0), run="r"))
    record.close()
    store.write_about("r", About(note="mine"))
    made = list(tmp_path.rglob("*"))
    assert len(made) > 10
    for path in made:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_store_that_others_can_read_is_made_private_but_for_what_the_user_chose(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "chosen")
    store.save(run(rank(0), run="r"))
    for folder in (store.root, store.runs, store.folder("r")):
        folder.chmod(0o777)
    store.save(run(rank(0), run="r"))
    modes = [
        stat.S_IMODE(folder.stat().st_mode)
        for folder in (store.root, store.runs, store.folder("r"))
    ]
    assert modes == [0o777, 0o700, 0o700]


def _writes(store: Store) -> None:
    """Every way to write to the record of the run r; each must be refused."""
    snapshot = run(rank(0), run="r")
    for write in (
        lambda: store.save(snapshot),
        lambda: store.keep_ring("r", "rank0.1.ring", memoryview(b"ring")),
        lambda: store.write_about("r", About(note="x")),
        lambda: store.remove("r"),
        lambda: store.rename("r", "other"),
    ):
        with pytest.raises((RingError, OSError)):
            write()
    record = Record(store.folder("r"))
    assert "is a link" in record.note or "belongs to someone else" in record.note
    record.keep([])
    record.see(snapshot)


@pytest.mark.parametrize("which", ["root", "runs"])
@pytest.mark.parametrize("what", ["a link", "another user's"])
@as_root
def test_a_store_of_another_user_or_behind_a_link_is_refused(
    tmp_path: Path, which: str, what: str
) -> None:
    """For reading, too: what it holds is not this user's."""
    store = Store(tmp_path / "store")
    Store(tmp_path / "real").save(run(rank(0), run="r"))
    place = store.root if which == "root" else store.runs
    place.parent.mkdir(exist_ok=True)
    if what == "a link":
        place.symlink_to(tmp_path / "real" / ("." if which == "root" else "runs"))
    else:
        (tmp_path / "real" / ("." if which == "root" else "runs")).rename(place)
        os.chown(place, NOBODY, NOBODY)
    before = sorted(path.name for path in (tmp_path).rglob("*"))
    _writes(store)
    assert store.names() == []
    with pytest.raises(RunNotFound, match=r"link|someone else") as caught:
        store.load()
    assert "ZEROMON_STORE" in caught.value.hint
    assert sorted(path.name for path in (tmp_path).rglob("*")) == before


@pytest.mark.parametrize("what", ["a link", "another user's"])
@as_root
def test_a_run_of_another_user_or_behind_a_link_is_no_record(tmp_path: Path, what: str) -> None:
    """It is not listed, not written through, and a new run of that name gets another one."""
    store, real = Store(tmp_path / "store"), Store(tmp_path / "real")
    store.save(run(rank(0), run="own"))
    real.save(run(rank(0), run="r"))
    if what == "a link":
        store.folder("r").symlink_to(real.folder("r"))
    else:
        real.folder("r").rename(store.folder("r"))
        os.chown(store.folder("r"), NOBODY, NOBODY)
    assert store.names() == ["own"]
    before = sorted(path.name for path in tmp_path.rglob("*"))
    _writes(store)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert store.free_name("r", 1.0) == "r-2"
    with pytest.raises(RunNotFound):
        store.load("r")


def test_a_folder_that_is_swapped_for_a_link_while_it_is_written_changes_nothing(
    tmp_path: Path,
) -> None:
    """The writer holds the folder itself, not its name."""
    store = Store(tmp_path / "store")
    record = Record(store.folder("r"))
    (tmp_path / "elsewhere").mkdir()
    store.folder("r").rename(tmp_path / "moved")
    store.folder("r").symlink_to(tmp_path / "elsewhere")
    record.see(run(rank(0), run="r"))
    record.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert list((tmp_path / "moved" / "moments").iterdir())
    assert record.note == ""
