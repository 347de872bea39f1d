"""Device timing on a device that is pretended: its clock moves when the test says so.

What a real device does is checked by tests/gpu. Here: never waiting, what is written when, and that
nothing is recorded while a graph is captured.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.events import Done, Flag, Op, Phase, Stall, decode, head, place
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON, HookContext

MS = 1_000_000


class Event:
    """An event that has passed once the device's clock has reached it."""

    made = 0

    def __init__(self, cuda: FakeCuda) -> None:
        Event.made += 1
        self.cuda = cuda
        self.at = -1.0

    def record(self) -> None:
        self.at = self.cuda.queue_ms

    def query(self) -> bool:
        return self.cuda.now_ms >= self.at

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query(), "read before it has passed"
        return later.at - self.at


class FakeCuda:
    """The part of torch.cuda that the timer uses. ``queue_ms``: when work enqueued now would run."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.queue_ms = 0.0
        self.capturing = False
        self.stream = "compute"

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def is_initialized(self) -> bool:
        return True

    def current_stream(self) -> str:
        return self.stream

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


@pytest.fixture
def parts(tmp_path: Path) -> tuple[FakeCuda, DeviceTimer, RingReader, HookContext]:
    ring = RingWriter(tmp_path / "r.ring", rank=0, capacity=1024)
    context = HookContext(ring, Guard())
    context.mode = ON
    cuda = FakeCuda()
    timer = DeviceTimer(context, cuda)
    timer.mark_compute_stream()
    return cuda, timer, RingReader(ring.path), context


def entry(issued_ns: int = 1000 * MS) -> list[object]:
    """An all-gather of 64 bytes that was issued."""
    word = head(0, Op.ALL_GATHER, Phase.FORWARD)
    return [word, place(1, 2), 64, issued_ns, 9, 0, None, -1]


def wait(cuda: FakeCuda, timer: DeviceTimer, made: list[object], stands_ms: float) -> None:
    """The stream reaches the wait and stands still for so long."""
    waiting = timer.reached_wait([made])
    assert waiting is not None
    cuda.queue_ms += stands_ms
    timer.left_wait(waiting)


def events(reader: RingReader) -> list[object]:
    return [decode(raw) for raw in reader.read()]


def test_nothing_is_written_before_the_device_has_passed(parts) -> None:  # type: ignore[no-untyped-def]
    """poll() asks and goes on; when the events have passed, one record comes."""
    cuda, timer, reader, _ = parts
    made = entry()
    timer.issued(made)
    cuda.queue_ms += 2
    wait(cuda, timer, made, 5)
    timer.poll()
    assert events(reader) == []
    cuda.now_ms = 100
    timer.poll()
    (done,) = events(reader)
    assert isinstance(done, Done)
    assert (done.blocked_ns, done.t_ns - done.issued_ns) == (5 * MS, 7 * MS)
    assert done.flags == Flag.DEVICE | Flag.END_KNOWN
    assert (done.op, done.group, done.unit, done.nbytes, done.sequence) == (1, 1, 2, 64, 9)


def test_a_wait_that_does_not_stand_still_gives_only_an_upper_bound(parts) -> None:  # type: ignore[no-untyped-def]
    """The collective had ended before; nobody knows when."""
    cuda, timer, reader, _ = parts
    made = entry()
    timer.issued(made)
    cuda.queue_ms += 2
    wait(cuda, timer, made, 0)
    cuda.now_ms = 100
    timer.poll()
    (done,) = events(reader)
    assert (done.blocked_ns, done.flags) == (0, Flag.DEVICE)


def test_a_wait_on_another_stream_is_not_exposed(parts) -> None:  # type: ignore[no-untyped-def]
    """FSDP waits for its gathers on the all-gather stream first."""
    cuda, timer, reader, _ = parts
    made = entry()
    cuda.stream = "all-gather"
    timer.issued(made)
    wait(cuda, timer, made, 5)
    cuda.now_ms = 100
    timer.poll()
    (done,) = events(reader)
    assert (done.blocked_ns, done.t_ns - done.issued_ns) == (0, 5 * MS)
    assert done.flags & Flag.END_KNOWN


def test_a_stall_at_a_unit_is_written_with_the_unit(parts) -> None:  # type: ignore[no-untyped-def]
    """The compute stream waits for the unit's event."""
    cuda, timer, reader, context = parts
    context.unit = 7

    def stand_still() -> None:
        cuda.queue_ms += 3

    timer.stall(Op.ALL_GATHER, stand_still)
    cuda.now_ms = 50
    timer.poll()
    (stall,) = events(reader)
    assert isinstance(stall, Stall)
    assert (stall.op, stall.unit, stall.blocked_ns) == (Op.ALL_GATHER, 7, 3 * MS)


def test_graph_capture_is_left_alone(parts) -> None:  # type: ignore[no-untyped-def]
    """No event is recorded, the wait itself happens."""
    cuda, timer, reader, _ = parts
    cuda.capturing = True
    made, waited = entry(), []
    timer.issued(made)
    assert timer.reached_wait([made]) is None
    timer.stall(Op.ALL_GATHER, lambda: waited.append(1))
    timer.poll()
    assert (events(reader), waited) == ([], [1])


def test_events_are_used_again(parts) -> None:  # type: ignore[no-untyped-def]
    """A thousand collectives take no more events than are under way at once."""
    cuda, timer, _, _ = parts
    Event.made = 0
    for _ in range(1000):
        made = entry()
        timer.issued(made)
        wait(cuda, timer, made, 1)
        cuda.now_ms = cuda.queue_ms
        timer.poll()
    assert Event.made == 3
