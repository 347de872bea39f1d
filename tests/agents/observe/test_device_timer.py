"""Device timing on the virtual device: never waiting, what is written when, nothing in a capture.

`test_device_programs.py` holds the times against the schedule. What a real device does is checked by
tests/gpu.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from virtual_device import EPOCH_NS, Group, VirtualDevice

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Flag, Op, Phase
from zeromon.ring.events import Done, PhaseSpan, Stall, decode_record, pack_head, pack_place
from zeromon_agents.observe import device_timer
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import HELD_NS, ON, HookContext

MS = 1_000_000


class Parts(NamedTuple):
    device: VirtualDevice
    timer: DeviceTimer
    reader: RingReader
    patches: Patches

    def events(self) -> list[object]:
        return [decode_record(raw) for raw in self.reader.read()]

    def gather(self, duration_ns: int, copied_ns: int = 0) -> None:
        """The current stream gathers, waits, and copies."""
        made = entry()
        self.timer.issued(made)
        group = Group(self.device)
        work, _ = group.issue(1, peers=0, duration=duration_ns, asynchronous=True)
        waiting = self.timer.reached_wait([made])
        assert waiting is not None and work is not None
        work.wait()
        self.timer.left_wait(waiting)
        self.device.current.run("compute", copied_ns)

    def passed(self) -> list[object]:
        """What is written once the device has done everything."""
        self.device.synchronize()
        self.timer.poll()
        return self.events()


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    ring = RingWriter(tmp_path / "r.ring", rank=0, capacity=1024)
    context = HookContext(ring, Guard())
    context.mode = ON
    device, patches = VirtualDevice(), Patches()
    timer = DeviceTimer(context, device)
    timer.install(patches)
    timer.mark_compute_stream()
    with device.host_clock():
        yield Parts(device, timer, RingReader(ring.path), patches)


def entry(issued_ns: int = EPOCH_NS) -> list[object]:
    """An all-gather of 64 bytes that was issued."""
    word = pack_head(0, Op.ALL_GATHER, Phase.FORWARD)
    return [word, pack_place(1, 2), 64, issued_ns, 9, 0, None, 0]


def test_nothing_is_written_before_the_device_has_passed(parts: Parts) -> None:
    """poll() asks and goes on; when the events have passed, one record comes."""
    parts.gather(5 * MS)
    parts.timer.poll()
    assert parts.events() == []
    (done,) = parts.passed()
    assert isinstance(done, Done)
    assert (done.blocked_ns, done.t_ns - done.issued_ns) == (5 * MS, 5 * MS)
    assert done.flags == Flag.DEVICE | Flag.SPAN_KNOWN
    assert (done.op, done.group, done.unit, done.nbytes, done.sequence) == (1, 1, 2, 64, 9)


@pytest.mark.parametrize("number", [0, 1])
def test_a_wait_that_does_not_stand_still_gives_only_an_upper_bound(parts: Parts, number: int) -> None:
    """The collective had ended before; nobody knows when. On a side stream, too."""
    with parts.device.stream(number):
        parts.gather(0)
    (done,) = parts.passed()
    assert isinstance(done, Done)
    assert (done.blocked_ns, done.flags) == (0, Flag.DEVICE)


def test_a_device_that_waits_for_its_host_communicates_from_the_launch_on(parts: Parts) -> None:
    """The host takes 3 ms to launch a gather of 1 ms, and 2 ms more until the wait is enqueued."""
    made, group = entry(), Group(parts.device)
    parts.timer.issued(made)
    parts.device.now += 3 * MS
    work, _ = group.issue(1, peers=0, duration=MS, asynchronous=True)
    made[HELD_NS] = 3 * MS
    waiting = parts.timer.reached_wait([made])
    assert waiting is not None and work is not None
    work.wait()
    parts.device.now += 2 * MS
    parts.timer.left_wait(waiting)
    (done,) = parts.passed()
    assert isinstance(done, Done)
    assert done.t_ns - done.issued_ns == 2 * MS  # the end is that of the host's wait at most
    assert not done.flags & Flag.SPAN_KNOWN


@pytest.mark.parametrize(("gather_ms", "is_known"), [(20, False), (70, True)])
def test_a_gather_that_begins_sometime_in_its_call_is_known_if_it_is_long(
    parts: Parts, gather_ms: int, is_known: bool
) -> None:
    """The host's call takes 3 ms, and the device has nothing else to do."""
    made, group = entry(), Group(parts.device)
    parts.timer.issued(made)
    parts.device.now += 3 * MS
    work, _ = group.issue(1, peers=0, duration=gather_ms * MS, asynchronous=True)
    made[HELD_NS] = 3 * MS
    waiting = parts.timer.reached_wait([made])
    assert waiting is not None and work is not None
    work.wait()
    parts.timer.left_wait(waiting)
    (done,) = parts.passed()
    assert isinstance(done, Done)
    assert done.t_ns - done.issued_ns == gather_ms * MS
    assert bool(done.flags & Flag.SPAN_KNOWN) == is_known


@pytest.mark.parametrize(("held_ms", "is_known"), [(0, True), (2, False)])
def test_what_ended_before_the_host_recorded_its_end_has_no_known_end(
    parts: Parts, held_ms: int, is_known: bool
) -> None:
    """A gather of 1 ms on the current stream, in a call that takes so long after its launch."""
    made = entry()
    parts.timer.issued(made)
    parts.device.current.run("gather", MS)
    parts.device.now += held_ms * MS
    parts.timer.ran_here(made)
    (done,) = parts.passed()
    assert isinstance(done, Done)
    assert bool(done.flags & Flag.SPAN_KNOWN) == is_known
    assert done.t_ns - done.issued_ns == max(1, held_ms) * MS


def test_a_wait_on_another_stream_is_not_exposed(parts: Parts) -> None:
    """FSDP waits for its gathers on the all-gather stream first."""
    with parts.device.stream(1):
        parts.gather(5 * MS)
    (done,) = parts.passed()
    assert isinstance(done, Done)
    assert (done.blocked_ns, done.t_ns - done.issued_ns) == (0, 5 * MS)
    assert done.flags & Flag.SPAN_KNOWN


def test_the_compute_stream_waits_for_a_stream_that_gathers(parts: Parts) -> None:
    """FSDP2's event, FSDP1's and DeepSpeed's wait_stream: its copies do not count."""
    with parts.device.stream(1):
        parts.gather(5 * MS, copied_ns=3 * MS)
    parts.device.current.run("compute", 2 * MS)
    parts.device.current.wait_stream(parts.device.streams[1])
    done, stall = parts.passed()
    assert isinstance(done, Done) and isinstance(stall, Stall)
    assert (done.blocked_ns, stall.blocked_ns) == (0, 3 * MS)
    assert (stall.op, stall.group, stall.unit) == (Op.ALL_GATHER, 1, 2)
    assert stall.flags & Flag.DEVICE
    assert (stall.sequence, stall.reached_ns) == (done.sequence, 0)  # no clock before the first border


def test_a_wait_for_a_stream_says_when_it_began(parts: Parts) -> None:
    """The compute stream computes for 2 ms of a gather of 5 ms, and waits for the others."""
    parts.timer.border(Phase.OTHER, None)
    with parts.device.stream(1):
        parts.gather(5 * MS)
    parts.device.current.run("compute", 2 * MS)
    parts.device.current.wait_stream(parts.device.streams[1])
    done, stall = parts.passed()[-2:]
    assert isinstance(done, Done) and isinstance(stall, Stall)
    assert (stall.reached_ns - done.issued_ns, stall.blocked_ns) == (2 * MS, 3 * MS)
    assert (stall.sequence, stall.calls) == (done.sequence, 0)


def test_a_second_wait_for_the_same_gather_stands_still_no_more(parts: Parts) -> None:
    with parts.device.stream(1):
        parts.gather(5 * MS)
        gathered = parts.device.current.record_event()
    for _ in range(3):
        parts.device.current.wait_event(gathered)
    assert [type(event) for event in parts.passed()] == [Done, Stall]


def test_graph_capture_is_left_alone(parts: Parts) -> None:
    """No event is recorded, none is asked, the waits themselves happen."""
    with parts.device.stream(1):
        parts.gather(5 * MS)
        gathered = parts.device.current.record_event()
    made = parts.device.made
    with parts.device.graph():
        assert parts.timer.captures()
        assert parts.timer.reached_wait([entry()]) is None
        parts.device.current.wait_event(gathered)
        parts.timer.poll()
    assert parts.device.made == made and not parts.device.broken
    assert [type(event) for event in parts.passed()] == [Done]


def test_events_are_used_again(parts: Parts) -> None:
    """A thousand collectives take no more events than are under way at once."""
    for _ in range(1000):
        parts.gather(MS)
        parts.passed()
    assert parts.device.made == 2


def test_waits_that_the_compute_stream_has_passed_are_forgotten(parts: Parts) -> None:
    for _ in range(100):
        with parts.device.stream(1):
            parts.gather(MS)
        parts.device.current.wait_stream(parts.device.streams[1])
        parts.passed()
        assert not parts.timer._waits


def test_streams_that_wait_for_each_other_keep_a_bounded_chain(parts: Parts) -> None:
    """No compute stream ever waits for them."""
    for _ in range(3 * device_timer._DEPTH):
        for number in (1, 2):
            with parts.device.stream(number):
                parts.gather(MS)
                parts.device.current.wait_stream(parts.device.streams[3 - number])
    parts.device.synchronize()
    kept = [wait for waits in parts.timer._waits.values() for wait in waits]
    assert max(wait.depth for wait in kept) <= device_timer._DEPTH


def test_the_optimizers_stream_computes_where_no_framework_says_more(parts: Parts) -> None:
    parts.timer._compute_stream = None
    parts.timer.poll()
    with parts.device.stream(1):
        parts.gather(5 * MS)
    (done,) = parts.passed()
    assert isinstance(done, Done) and done.blocked_ns == 0


def test_nothing_is_patched_after_detach(parts: Parts) -> None:
    assert parts.patches.restore() == []
    assert vars(parts.device.Event)["wait"].__qualname__.startswith("VirtualDevice")


def test_a_border_is_no_later_than_the_call_that_records_it(parts: Parts) -> None:
    """The device may come to the event at once, and the call return late on a busy host."""
    record = parts.timer._record

    def record_slowly(event: Any, stream: Any) -> None:
        record(event, stream)
        parts.device.now += 20 * MS

    parts.timer._record = record_slowly
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        parts.timer.border(phase, None)
    returned_ns = time.monotonic_ns()
    *_, backward = parts.passed()
    assert isinstance(backward, PhaseSpan) and backward.phase is Phase.BACKWARD
    assert backward.t_ns <= returned_ns - 20 * MS


@pytest.mark.parametrize("gain", [5e-5, -5e-5])
def test_a_drifting_clock_does_not_put_an_idle_device_behind_its_host(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, gain: float
) -> None:
    """After ten minutes of a device's clock that gains or loses 50 us per second."""
    device, elapsed = parts.device, parts.device.PlainEvent.elapsed_time
    monkeypatch.setattr(
        device.PlainEvent, "elapsed_time", lambda start, end: elapsed(start, end) * (1 + gain)
    )
    spans: list[object] = []
    for _ in range(6000):
        device.now += 100 * MS
        parts.timer.poll()
        parts.timer.border(Phase.FORWARD, None)
        spans += parts.events()
    last = spans[-1]
    assert isinstance(last, PhaseSpan)
    assert last.lag_ns < MS // 10


def test_a_stream_that_cannot_be_found_is_the_scripts_to_find(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the agent's lookup is counted, and the event is recorded all the same."""

    def refuse() -> None:
        raise RuntimeError("no current stream")

    monkeypatch.setattr(parts.device, "current_stream", refuse)
    event = parts.device.Event()
    event.record()
    event.wait()
    assert event.at is not None
    assert parts.timer._context.guard.errors == 2
