"""Fixtures."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from support import Node

from zeromon.ring.ring_file import remove_orphan_rings, remove_ring_file

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

LONGEST = (
    "test_deepspeed", "test_browser", "test_attacks_on_files", "test_attached", "test_nodes",
    "sources/prometheus/test_source", "test_bootstrap", "test_faults", "test_tui", "test_peaks_on_gloo",
    "test_memory_death", "test_trace_capture", "test_hangs", "test_counts", "test_in_effect",
    "test_hooks", "test_kept_activations", "test_plan", "cli/test_compare", "test_example",
    "test_grafana", "test_inject", "test_exposition", "test_history", "test_imports", "test_forecast",
    "export/prometheus/test_rules",
)  # fmt: skip
"""Test files, the longest first: two workers that take whole files in this order end together."""

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="zeromon-state-")
"""Tests make no file in the user's own folder: the token of their servers is here."""

_LOCK_SECONDS = 120
"""No operator of DeepSpeed that a CPU run compiles takes so long."""


def pytest_sessionstart() -> None:
    """Removes a lock that a killed run left in torch's extension cache: DeepSpeed would wait for it."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    for lock in Path(cache).glob("**/lock"):
        with suppress(FileNotFoundError):
            if time.time() - lock.stat().st_mtime > _LOCK_SECONDS:
                lock.unlink()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Removes the rings that the tests have left: the memory outlives their files."""
    # not glob(): a process that still ends may remove a folder meanwhile
    for folder, _, names in os.walk(session.config._tmp_path_factory.getbasetemp()):  # type: ignore[attr-defined]
        for name in names:
            if name.endswith(".ring"):
                with suppress(OSError):
                    remove_ring_file(Path(folder, name))
    # those of a test that runs beside this session may be in a mount namespace of its own
    remove_orphan_rings(unused_seconds=3600)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Lets no garbage collection visit what stays: 700,000 objects of modules and tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts files by how long they take; the order of tests within a file stays."""

    def place(item: pytest.Item) -> int:
        file = item.path.with_suffix("").as_posix()
        return next((n for n, name in enumerate(LONGEST) if file.endswith(name)), len(LONGEST))

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what this torch cannot do, by what it lacks and not by its version."""
    wanted = {mark.name for mark in item.iter_markers()} & {"fsdp2", "recorder"}
    if not wanted:
        return
    import torch

    if "fsdp2" in wanted and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of this torch does not run on a CPU: its streams have no events")
    if "recorder" in wanted and not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch keeps no Flight Recorder of gloo, which names what C++ issues")


def pytest_unconfigure() -> None:
    """Removes the state folder of this session."""
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def shared_node() -> Iterator[Node]:
    """One node for all tests that only read what a run did."""
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-test-")))
    yield node
    node.close()


@pytest.fixture
def node() -> Iterator[Node]:
    """A fresh node."""
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-test-")))
    yield node
    node.close()
