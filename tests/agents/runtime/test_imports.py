"""Callbacks on modules: several may wait for one module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from zeromon_agents.runtime.imports import ImportWatch


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
