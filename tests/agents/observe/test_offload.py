"""What goes to and from the disk, on a stand-in for DeepSpeed's compiled handle.

The real handle takes minutes to compile: `make test-nvme` runs it and compares with the kernel.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Path as Way
from zeromon.ring.events import Transfer, decode_record
from zeromon_agents.observe.offload import Disk, Transfers
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import OFF, ON, HookContext

SLOW_S = 0.02


class Handle:
    """Requests end together, SLOW_S after the first was submitted."""

    def __init__(self) -> None:
        self.ends = 0.0

    def async_pread(self, buffer: torch.Tensor, name: str) -> int:
        return self._submit()

    def async_pwrite(self, buffer: torch.Tensor, name: str) -> int:
        return self._submit()

    def _submit(self) -> int:
        self.ends = self.ends or time.monotonic() + SLOW_S
        return 0

    def sync_pread(self, buffer: torch.Tensor, name: str) -> int:
        time.sleep(SLOW_S)
        if name == "missing":
            raise RuntimeError("no such file")
        return 1

    def wait(self) -> int:
        time.sleep(max(0.0, self.ends - time.monotonic()))
        self.ends = 0.0
        return 1


class World:
    """A ring, a context, and a builder that loads the stand-in."""

    def __init__(self, folder: Path) -> None:
        ring = RingWriter(folder / "r.ring", rank=0, capacity=1024)
        self.context = HookContext(ring, Guard())
        self.context.mode = ON
        self.reader = RingReader(ring.path)
        self.patches = Patches()
        self.transfers = Transfers(self.context)
        self.kind = type("aio_handle", (), dict(vars(Handle)))
        module = SimpleNamespace(aio_handle=self.kind)

        class OpBuilder:
            name = "async_io"
            _loaded_ops: ClassVar[dict[str, object]] = {}

            def load(self) -> object:
                return module

        disk = Disk(self.context, self.transfers, self.patches)
        disk.watch(SimpleNamespace(OpBuilder=OpBuilder))
        OpBuilder().load()
        OpBuilder().load()  # the second time there is nothing left to patch
        self.handle = self.kind()

    def told(self) -> dict[Way, Transfer]:
        """What the step's records say."""
        self.transfers.flush()
        events = (decode_record(raw) for raw in self.reader.read())
        return {event.path: event for event in events if isinstance(event, Transfer)}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_requests_last_from_the_first_submission_to_the_end_of_the_wait(world: World) -> None:
    """Two reads of 4,000 bytes: one span, which the thread waited for."""
    buffer = torch.zeros(1000)
    world.handle.async_pread(buffer, "a")
    world.handle.async_pread(buffer, "b")
    assert world.handle.wait() == 1
    read = world.told()[Way.DISK_READ]
    assert read.nbytes == 8000
    assert read.busy_ns >= SLOW_S * 1e9
    assert 0 < read.blocked_ns <= read.busy_ns


def test_a_wait_that_comes_late_blocks_nothing(world: World) -> None:
    """The reads are over when they are waited for: time under way, but none stood still."""
    world.handle.async_pread(torch.zeros(1000), "a")
    time.sleep(2 * SLOW_S)
    world.handle.wait()
    read = world.told()[Way.DISK_READ]
    assert read.blocked_ns < SLOW_S * 1e9 / 2 < read.busy_ns


def test_reads_and_writes_share_a_wait_by_their_bytes(world: World) -> None:
    """Three quarters were written."""
    world.handle.async_pread(torch.zeros(1000), "a")
    world.handle.async_pwrite(torch.zeros(3000), "b")
    world.handle.wait()
    told = world.told()
    assert (told[Way.DISK_READ].nbytes, told[Way.DISK_WRITE].nbytes) == (4000, 12000)
    ratio = told[Way.DISK_WRITE].blocked_ns / told[Way.DISK_READ].blocked_ns
    assert ratio == pytest.approx(3, rel=0.01)


def test_a_synchronous_read_holds_the_thread_also_when_it_fails(world: World) -> None:
    """Its error goes to the caller, unchanged."""
    with pytest.raises(RuntimeError, match="no such file"):
        world.handle.sync_pread(torch.zeros(10), "missing")
    read = world.told()[Way.DISK_READ]
    assert read.blocked_ns == read.busy_ns >= SLOW_S * 1e9


def test_a_wait_without_requests_and_a_stopped_recorder_write_nothing(world: World) -> None:
    world.handle.wait()
    world.context.mode = OFF
    world.handle.async_pread(torch.zeros(10), "a")
    world.handle.wait()
    world.handle.sync_pread(torch.zeros(10), "a")
    assert world.told() == {}


def test_what_is_no_tensor_is_the_callers_affair(world: World) -> None:
    """A buffer without a size is noted, and handed on."""
    assert world.handle.async_pread("no tensor", "a") == 0
    assert world.context.guard.errors == 1


def test_restoring_leaves_the_handle_as_it_was(world: World) -> None:
    world.patches.restore()
    assert {k: v for k, v in vars(world.kind).items() if k in vars(Handle) and callable(v)} == {
        k: v for k, v in vars(Handle).items() if callable(v)
    }
