"""The store of ended runs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import device_memory, rank, run

from zeromon.base.errors import RingError, RunAmbiguous, RunNotFound, ZeromonError
from zeromon.readout.report import render_run
from zeromon.readout.text import run_state, state_text
from zeromon.readout.verdict import Health, judge_run
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.run import About
from zeromon.storage.run_store import Store, decode_snapshot, encode_snapshot
from zeromon.storage.snapshot_log import Record
from zeromon.tui.columns import DisplayOptions
from zeromon.tui.plots import Trends
from zeromon.tui.view_model import ViewModel, status_line


def test_a_picture_survives_json() -> None:
    """Field by field."""
    snapshot = run(rank(0, memory_device=device_memory()), rank(1))
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"run": 3}', b"\xff\xfe"])
def test_a_broken_record_is_a_clear_error(text: bytes) -> None:
    """With a hint, never a traceback of msgspec."""
    with pytest.raises(ZeromonError) as caught:
        decode_snapshot(text)
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
    store.prune_runs(keep=1)
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
        stat.S_IMODE(folder.stat().st_mode) for folder in (store.root, store.runs, store.folder("r"))
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


def test_a_folder_that_is_swapped_for_a_link_while_it_is_written_changes_nothing(tmp_path: Path) -> None:
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


# ---- a store that is full -----------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of two MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", str(folder)]
    subprocess.run(mount, check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Takes all room that is left."""
    with suppress(OSError), (folder / "x").open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def stepped(count: int, **facts: Any) -> RunSnapshot:
    """A run whose ranks are in step *count*."""
    return run(rank(0, last_step=count), rank(1, last_step=count), run="r", **facts)


@as_root
def test_the_last_snapshot_has_room_when_the_store_is_full(small: Path) -> None:
    """It was reserved with the first; the room is given back at the end."""
    store = Store(small)
    store.save(stepped(3))
    fill(small)
    assert shutil.disk_usage(small).free == 0
    for count in (60, 80):
        store.save(stepped(count, history_note="cannot write x: No space left on device"))
    ended = stepped(100, ended=True, history_note="no space left", history_step=61)
    store.save(replace(ended, history_until=time.mktime((2026, 11, 25, 14, 3, 0, 0, 0, -1))))
    kept = store.load("r")
    lost = "its record is incomplete: the store was full from 2026-11-25 14:03 on, step 61 of 100"
    assert run_state(kept) == f"finished after 100 steps; {lost}"
    assert lost in judge_run(kept).text
    assert not (store.folder("r") / ".reserve").exists()


@as_root
def test_a_store_without_any_room_keeps_what_it_had_and_says_so(small: Path) -> None:
    """Somebody else took the room that was reserved, too."""
    store = Store(small)
    store.save(stepped(3))
    (store.folder("r") / ".reserve").unlink()
    fill(small)
    with pytest.raises(OSError, match="No space left"):
        store.save(stepped(100, ended=True))
    assert store.load("r").ranks[0].steps.last_step == 3
    assert sorted(path.name for path in store.folder("r").iterdir()) == [
        "manifest.json", "snapshot.json",
    ]  # fmt: skip


def abandoned(store: Store, snapshot: RunSnapshot) -> RunSnapshot:
    """What is read of *snapshot*, the last of its record, when no collector has saved it for long."""
    store.save(snapshot)
    long_ago = time.time() - 3600
    os.utime(store.folder("r") / "snapshot.json", (long_ago, long_ago))
    return store.load("r")


def test_a_record_without_an_end_is_incomplete_and_never_running(tmp_path: Path) -> None:
    """In every view: the text report, the HTML report, the list of runs, the terminal, JSON."""
    noon = time.mktime((2026, 11, 25, 12, 0, 0, 0, 0, -1))
    store = Store(tmp_path)
    kept = abandoned(store, stepped(61, taken_wall=noon))
    said = "incomplete: nothing was written after 2026-11-25 12:00, step 61"
    assert run_state(kept) == said
    assert judge_run(kept).text.startswith(said)
    (listed,) = store.list_manifests()
    assert (listed.health, listed.ended) == ("incomplete", True)
    model = ViewModel(run=kept, ranks=kept.ranks, look=DisplayOptions(), trends=Trends())
    texts = {
        "report": render_run(kept),
        "list": listed.verdict,
        "terminal": "".join(part[0] for part in status_line(model, noon + 3600)),
        "rank": " ".join(state_text(one) for one in kept.ranks),
    }
    for view, text in texts.items():
        assert "running" not in text, view
    assert "not seen for the rest of the run" in texts["rank"]
    assert said in texts["report"]


def test_a_full_store_is_the_reason_where_it_is_known(tmp_path: Path) -> None:
    """With when, and the last step of the history."""
    facts = {"history_note": "cannot write x: No space left on device", "history_step": 61}
    until = time.mktime((2026, 11, 25, 14, 3, 0, 0, 0, -1))
    kept = abandoned(Store(tmp_path), stepped(100, history_until=until, **facts))
    text = "incomplete: the store was full from 2026-11-25 14:03 on, step 61 of at least 100"
    assert judge_run(kept).text.startswith(text)


def test_a_death_before_the_record_broke_off_is_told_beside_it(tmp_path: Path) -> None:
    dead = rank(1, alive=False, failed=True, ended="SIGSEGV")
    kept = abandoned(Store(tmp_path), run(rank(0), dead, run="r"))
    judged = judge_run(kept)
    assert judged.health is Health.INCOMPLETE
    assert "before: died: rank 1, SIGSEGV" in judged.cause


def test_a_record_that_is_still_written_is_as_it_was(tmp_path: Path) -> None:
    """By a collector of another node, say."""
    store = Store(tmp_path)
    store.save(stepped(61))
    assert store.load("r").ranks[0].status.alive
    assert not store.list_manifests()[0].ended
