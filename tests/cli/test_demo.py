"""`make demo` at a terminal: the view opens as soon as a rank has reported."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
from builders import rank, run
from support import ROOT

from zeromon.base.errors import RunNotFound


def test_the_demo_sees_its_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """First no run, then a run without ranks, then one rank; not the end of the training."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    seen = iter([None, run(), run(rank(0))])

    def find(name: str) -> list[SimpleNamespace]:
        snapshot = next(seen)
        if snapshot is None:
            raise RunNotFound(f"no run matches {name}")
        source = SimpleNamespace(latest=lambda: snapshot)
        return [SimpleNamespace(open=lambda: source)]

    monkeypatch.setattr(demo, "find_live_runs", find)
    monkeypatch.setattr(demo.time, "sleep", lambda _: None)
    training = SimpleNamespace(poll=lambda: None)
    assert demo.wait_for_ranks("demo", training)
    assert next(seen, "all were asked for") == "all were asked for"
