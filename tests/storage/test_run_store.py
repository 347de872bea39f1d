"""The store of ended runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import device_memory, rank, run

from zeromon.errors import RunAmbiguous, RunNotFound, ZeromonError
from zeromon.storage.run_store import Store, decode, encode


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
