"""Random programs for the virtual device, and what the agent's own hooks and timer record of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from virtual_device import Group, VirtualDevice, Work, exposed

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Flag
from zeromon.ring.events import Done, Issued, Stall, decode_record, pack_place
from zeromon_agents.hooks import process_groups
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.process_groups import PAYLOADS
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON, HookContext

STREAMS, GROUPS, EVENTS = 4, 3, 3
TICK = 1
"""Nanoseconds. torch gives times as milliseconds in floating point; the timer rounds them."""

with FakeTensorMode():
    _PAYLOAD = torch.empty(4, device="cuda")

Program = list[tuple[Any, ...]]

_time = st.one_of(st.integers(0, 200), st.integers(2_500, 900_000))
_stream = st.integers(0, STREAMS - 1)
_issue = st.tuples(
    st.just("issue"), st.integers(0, GROUPS - 1), _time, _time, st.booleans()
)  # group, how late the last rank is, duration, asynchronous
_compute = st.tuples(st.just("compute"), _time)
_wait = st.tuples(st.just("wait"), st.integers(0, 7))
_alone = st.one_of(
    _compute,
    _issue,
    _issue,
    _wait,
    _wait,
    st.tuples(st.just("wait_stream"), _stream),
    st.tuples(st.just("wait_stream"), _stream),
    st.tuples(st.just("record"), st.integers(0, EVENTS - 1)),
    st.tuples(st.just("wait_event"), st.integers(0, EVENTS - 1)),
    st.tuples(st.just("host"), _time),
    st.tuples(st.just("step"), st.booleans()),
)
_side = st.tuples(st.just("on"), _stream, st.lists(_alone, min_size=1, max_size=5))
_capture = st.tuples(
    st.just("capture"),
    st.lists(st.one_of(_compute, _issue, _wait, st.just(("step", False))), max_size=4),
)
_loop = st.tuples(st.just("evaluate"), st.integers(2, 24), _time, _time)


@st.composite
def _prefetch(draw: st.DrawFn) -> tuple[Any, ...]:
    """A side stream gathers and copies, perhaps others wait for it; the compute stream waits later."""
    side, other = draw(st.permutations(range(1, STREAMS)))[:2]
    gather = ("issue", draw(st.integers(0, GROUPS - 1)), draw(_time), draw(_time), draw(st.booleans()))
    program: Program = [("on", side, [gather, ("wait", -1), ("compute", draw(_time))])]
    if draw(st.booleans()):
        program.append(("on", other, [("wait_stream", side)]))
    program += draw(st.lists(_alone, max_size=2))
    if draw(st.booleans()):
        program += [("step", True), ("on", side, [("compute", draw(_time))])]
    return ("run", [*program, ("wait_stream", draw(st.sampled_from([side, other])))])


PROGRAMS: st.SearchStrategy[Program] = st.lists(
    st.one_of(_alone, _alone, _alone, _side, _side, _prefetch(), _prefetch(), _capture, _loop),
    min_size=1,
    max_size=10,
)


class Result(NamedTuple):
    """What was recorded of a program, and what is true of it. A collective's number is its unit."""

    recorded: dict[int, int]
    true: dict[int, int]
    ends: list[tuple[int, int, bool]]
    """Of each collective: recorded minus true duration, exposed time, and whether the end is known."""
    device: VirtualDevice
    faults: str


class Ring:
    """One ring for all programs: to create a file takes longer than to run a program."""

    def __init__(self, path: Path) -> None:
        self.writer = RingWriter(path, rank=0, capacity=2048)
        self.reader = RingReader(path)

    def events(self) -> list[Any]:
        return [decode_record(raw) for raw in self.reader.read()]


class Run:
    """One program on one device, under the hooks that training has."""

    def __init__(self, ring: Ring, device: VirtualDevice) -> None:
        self.ring, self.device = ring, device
        self.guard = Guard()
        self.context = HookContext(ring.writer, self.guard)
        self.context.mode = ON
        self.timer = DeviceTimer(self.context, self.device)
        self.timer.mark_compute_stream()
        self.timer.install(Patches())
        collectives = Collectives(self.context, self.timer)
        collectives.end_warm_up()
        self.groups = []
        for number in range(GROUPS):
            group = Group(self.device)
            known = process_groups.Group(number + 1, None, size=2, on_device=True, base=0)
            known.seen_sequences, known.extras["allreduce"] = None, 0
            collectives.groups[id(group)] = known
            self.groups.append(group)
        self._issue = collectives._issue_hook(_issue_on, "allreduce", PAYLOADS["allreduce"])
        self._wait = collectives._wait_hook(Work.wait)
        self.works: list[Work] = []
        self.collectives: list[Any] = []
        self.captured: set[int] = set()
        self.events = [self.device.Event() for _ in range(EVENTS)]

    def run(self, program: Program) -> None:
        for name, *arguments in program:
            getattr(self, name)(*arguments)

    def compute(self, duration: int) -> None:
        self.device.current.run("compute", duration)

    def host(self, duration: int) -> None:
        self.device.now += duration

    def issue(self, group: int, peers: int, duration: int, asynchronous: bool) -> None:
        unit = len(self.collectives) + 1
        self.context.unit = pack_place(0, unit)
        arguments = _Arguments(self, unit, peers, duration, asynchronous)
        work = self._issue(self.groups[group], _PAYLOAD, arguments)
        self.collectives.append(arguments.collective)
        if work is not None:
            self.works.append(work)

    def wait(self, index: int) -> None:
        if self.works:
            self._wait(self.works.pop(index % len(self.works)))

    def wait_stream(self, number: int) -> None:
        if number != self.device.current.stream_id:
            self.device.current.wait_stream(self.device.streams[number])

    def record(self, number: int) -> None:
        self.events[number].record()

    def wait_event(self, number: int) -> None:
        self.device.current.wait_event(self.events[number])

    def on(self, number: int, program: Program) -> None:
        with self.device.stream(number):
            self.run(program)

    def step(self, synchronizes: bool) -> None:
        """The end of a step; some scripts read the loss there."""
        if synchronizes:
            self.device.synchronize()
        self.timer.poll()

    def capture(self, program: Program) -> None:
        outside, self.works = self.works, []
        before = len(self.collectives)
        with self.device.graph():
            self.run(program)
        self.works = outside
        self.captured |= set(range(before + 1, len(self.collectives) + 1))

    def evaluate(self, times: int, compute: int, duration: int) -> None:
        """Collectives beside compute, and no end of a step."""
        for _ in range(times):
            self.issue(0, 0, duration, True)
            self.compute(compute)
            self.wait(-1)

    def result(self) -> Result:
        self.device.synchronize()
        while self.timer._pending:
            self.timer.poll()
        recorded: dict[int, int] = {}
        ends = []
        faults = self.device.broken or (self.guard.first if self.guard.errors else "") or ""
        for event in self.ring.events():
            if isinstance(event, Issued) and event.unit in self.captured:
                faults = "a captured collective, which does not run, is in flight for ever"
            if isinstance(event, (Done, Stall)):
                recorded[event.unit] = recorded.get(event.unit, 0) + event.blocked_ns
            if isinstance(event, Done):
                collective = self.collectives[event.unit - 1]
                true = collective.end - collective.issued
                known = bool(event.flags & Flag.SPAN_KNOWN)
                ends.append((event.t_ns - event.issued_ns - true, event.blocked_ns, known))
        true = exposed(self.device.streams[0])
        return Result(recorded, true, ends, self.device, faults)


class _Arguments:
    """The options of a call, with what the virtual group needs."""

    def __init__(self, run: Run, number: int, peers: int, duration: int, asynchronous: bool) -> None:
        self.number, self.peers, self.duration = number, peers, duration
        self.asyncOp = asynchronous
        self.collective: Any = None


def _issue_on(group: Group, _: Any, options: _Arguments) -> Work | None:
    work, options.collective = group.issue(
        options.number, peers=options.peers, duration=options.duration, asynchronous=options.asyncOp
    )
    return work


def run(ring: Ring, program: Program, *, call_ns: int = 0) -> Result:
    """Runs *program* under the hooks, and returns what they recorded beside what is true."""
    ring.events()  # of a program that failed
    device = VirtualDevice(STREAMS, call_ns)
    with device.host_clock():
        running = Run(ring, device)
        running.run(program)
        return running.result()


def disagreement(result: Result) -> str:
    """Returns where record and truth differ by more than a tick; "" where they agree."""
    if result.faults:
        return result.faults
    for unit in result.recorded.keys() | result.true.keys():
        recorded, true = result.recorded.get(unit, 0), result.true.get(unit, 0)
        if abs(recorded - true) > TICK:
            return f"collective {unit} is exposed for {true} ns, {recorded} ns are recorded"
    for error, _, known in result.ends:
        if error < -TICK or (known and error > TICK):
            return f"the end of a collective is {error} ns off"
    return ""
