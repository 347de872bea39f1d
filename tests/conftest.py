"""Fixtures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import Node


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
