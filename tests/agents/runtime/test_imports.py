"""Callbacks on modules: several may wait for one module."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from zeromon_agents.runtime.imports import ImportClock, ImportWatch


@pytest.mark.parametrize("swept", [False, True])
def test_each_callback_of_a_module_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    """FSDP1's wrapper is patched by FSDP1's hooks and by those of what scripts log."""
    (tmp_path / "waited_for.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "waited_for", raising=False)
    watch, called = ImportWatch(), list[str]()
    watch.when_imported("waited_for", lambda _: called.append("first"))
    watch.when_imported("waited_for", lambda _: called.append("second"))
    if swept:  # as where another finder was faster
        monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not watch])
    importlib.import_module("waited_for")
    watch.sweep()
    assert called == ["first", "second"]
    watch.close()
    sys.modules.pop("waited_for")


def test_a_stand_in_for_a_module_is_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script puts an object without a specification in the place of a package."""
    watch, called = ImportWatch(), list[object]()
    watch.when_imported("stands_in", called.append)
    stand_in = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "stands_in", stand_in)  # type: ignore[arg-type]
    watch.sweep()
    watch.close()
    assert called == [stand_in]


def test_an_import_lasts_to_the_last_search_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script does between two imports is none; neither are those within a process group."""
    (tmp_path / "outermost.py").write_text("import time\ntime.sleep(0.02)\nimport within\n")
    (tmp_path / "within.py").write_text("")
    (tmp_path / "later.py").write_text("import time\ntime.sleep(0.02)\nimport within_later\n")
    (tmp_path / "within_later.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, clock = list(sys.meta_path), ImportClock()
    clock.start("json", time.monotonic_ns())
    importlib.import_module("outermost")
    time.sleep(0.05)
    joins = time.monotonic_ns()
    importlib.import_module("later")
    spent = clock.spent_ns(joins, time.monotonic_ns())
    assert 20e6 <= spent < clock.spent_ns(0, 0) - 15e6
    assert [begin for begin, end in clock._imports if end - begin >= 20e6][1] >= joins
    clock.stop()
    assert sys.meta_path == before
    for name in ("outermost", "within", "later", "within_later"):
        sys.modules.pop(name)
