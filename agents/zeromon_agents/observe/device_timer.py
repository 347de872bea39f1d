"""Times device work with events, without waiting for the device.

The host enqueues and runs ahead, so steps and phases are those of the compute stream: an event at each
border between two phases. A device's clock is related to the host's by two facts: the device comes to an
event after the host has recorded it, and before the host sees it complete.

Events come from a pool. They are recorded where work is issued and where a stream waits, and read only
after ``query()`` returns True. CPU backends do not use this module.

The host sees only the enqueueing of an NCCL collective. So the blocked time of device work is that of
the *compute stream*: the time between reaching the wait and leaving it. Where another stream waits for
the collective, and the compute stream waits for that stream, it is the part of the second wait in which
the other stream stood still: :meth:`DeviceTimer.waits_for`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from zeromon.ring.codes import Flag, Kind, Op, Phase
from zeromon.ring.events import pack_head
from zeromon_agents.observe.accelerator import Accelerator, current_accelerator
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.hook_context import (
    EVENT,
    HELD_NS,
    ISSUED_NS,
    NBYTES,
    ON,
    PLACE,
    SEQUENCE,
    WORD,
    Entry,
    HookContext,
    StepEnd,
)

_HALVINGS = 40
_SMALLEST_COPY = 3 << 20
"""A copy within a device takes at least as long as one of so many bytes: to start it, 1.9 us (H200)."""


def copy_size(nbytes: int, tensors: int) -> int:
    """Returns the bytes of one copy within a device that takes as long as those of *tensors*."""
    return nbytes + tensors * _SMALLEST_COPY


@dataclass(slots=True, eq=False)
class Bucket:
    """An all-reduce of the reducer."""

    entry: Entry
    """Its event is where the gradients of the bucket are computed."""
    tensors: int
    """The number of gradients in it."""
    left: Any = None
    """The event on the compute stream behind the call."""
    end: Any = None
    """The event at the end of the collective."""
    recorded_ns: int = 0
    """When the host had recorded it."""

    @property
    def is_known(self) -> bool:
        """True where all its events were recorded."""
        return None not in (self.entry[EVENT], self.left, self.end)

    @property
    def copy_size(self) -> int:
        """How long it takes to copy its gradients: see :func:`copy_size`."""
        return copy_size(int(self.entry[NBYTES]), self.tensors)


@dataclass(slots=True, eq=False)
class HiddenWait:
    """A part of a phase in which the compute stream waits, in C++, for collectives of DDP's reducer."""

    reached: Any
    group: int
    calls: int
    sequence: int
    """The group's number of the last of them; 0 where unknown."""
    buckets: Sequence[Bucket]
    """The collectives, where their own events are known; all of *calls* then."""
    copied: int
    """:func:`copy_size` of the gradients that are copied between the waits; 0 where none are."""
    left: Any = None


def waits_of_each(span: int, ends_ns: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Returns the nanoseconds that the compute stream stands still for each bucket.

    *span*: nanoseconds from the first wait to the end of the last copy. *ends_ns*: when each collective
    ends, from the first wait on; below 0 before it. *sizes*: :attr:`Bucket.copy_size` of each. Copies
    take a time in proportion to it, so that waits and copies add up to *span*.
    """
    low, high = 0.0, span / max(1, sum(sizes))
    for _ in range(_HALVINGS):
        copy_ns = (low + high) / 2
        _, total = _bucket_waits(copy_ns, ends_ns, sizes)
        low, high = (low, copy_ns) if total > span else (copy_ns, high)
    return [round(wait) for wait in _bucket_waits(low, ends_ns, sizes)[0]]


def _bucket_waits(
    copy_ns: float, ends_ns: Sequence[int], sizes: Sequence[int]
) -> tuple[list[float], float]:
    """Returns the wait for each bucket, and their sum with copies of *copy_ns* for each unit of size."""
    at, waits = 0.0, []
    for end_ns, size in zip(ends_ns, sizes, strict=True):
        waits.append(max(0.0, end_ns - at))
        at += waits[-1] + copy_ns * size
    return waits, at


_ON_DEVICE = int(Flag.DEVICE)
_IS_ASYNC = pack_head(0, flags=Flag.ASYNC)
_SPAN_KNOWN = pack_head(0, flags=Flag.SPAN_KNOWN)
_DONE, _STALL = pack_head(Kind.DONE, flags=Flag.DEVICE), pack_head(Kind.STALL, flags=Flag.DEVICE)
_POOL = 4096
_POLL_AT = 256
_POLL_NS = 1_000_000_000
_REMEMBERED = 256
"""Waits of a stream that are kept for the streams that wait for it."""
_DEPTH = 8
"""The most streams that wait for each other in a row; more would be kept without end."""
_BEHIND = "_zeromon_waits"
"""The attribute of a user's event with the waits that its stream had enqueued."""
_DRIFT = 10_000
"""Inverse of the maximum rate at which a device's clock gains on the host's."""
_NO_STALL_NS = 2000
"""Maximum gap between two adjacent events on a stream that did not stand still."""
_MAX_UNSURE = 0.05
"""Up to this share of a collective's duration its begin may be unknown: its call launches it within."""


class Waited:
    """A stream's wait whose events may not have completed yet.

    *entries*: the collectives that it waits for; none where it waits for another stream. *behind*: the
    waits that the other stream had enqueued.
    """

    __slots__ = ("behind", "depth", "entries", "left", "left_ns", "passed", "reached", "stream")

    def __init__(
        self,
        stream: int | None,
        reached: Any,
        left: Any,
        entries: Sequence[Entry],
        behind: tuple[Waited, ...] = (),
        left_ns: int = 0,
    ) -> None:
        self.stream = stream
        """The stream's id; None for the compute stream."""
        self.reached, self.left = reached, left
        self.entries, self.behind = entries, behind
        self.left_ns = left_ns
        """When the host had recorded both events; a collective that ended before has no known end."""
        self.depth: int = 1 + max([wait.depth for wait in behind], default=0)
        """The number of streams in a row that wait for each other."""
        self.passed = False
        """True if the compute stream has waited for it: a later wait cannot stand still for it."""

    def stalls(self, origin: Any, start_ns: int, end_ns: int) -> Iterator[tuple[int, int, Entry]]:
        """When a stream stood still in a window, and for which collectives.

        Times and the window count from the event *origin*.
        """
        # Inlined, because this runs for each wait: a function would be entered a hundred times a step
        start_ns = max(start_ns, round(origin.elapsed_time(self.reached) * 1e6))
        end_ns = min(end_ns, round(origin.elapsed_time(self.left) * 1e6))
        if end_ns <= start_ns:
            return
        if self.entries:
            yield start_ns, end_ns, self.entries[0]
        for wait in reversed(self.behind):  # of one stream, which leaves them in order
            if origin.elapsed_time(wait.left) * 1e6 <= start_ns:
                return
            yield from wait.stalls(origin, start_ns, end_ns)

    def pass_all(self) -> None:
        """Notes that the compute stream has waited for this wait and for those behind it."""
        if not self.passed:
            self.passed = True
            for wait in self.behind:
                wait.pass_all()


class Border:
    """Where one phase of the compute stream ends and another begins. The event may not be complete."""

    __slots__ = ("after_gap", "before_ns", "entered_ns", "left", "phase", "step_end")

    def __init__(self, phase: int, step_end: StepEnd | None, *, after_gap: bool) -> None:
        self.left: Any = None
        """The event."""
        self.entered_ns = self.before_ns = time.monotonic_ns()
        """Before the host recorded it, and the last time when the device had not come to it."""
        self.phase = phase
        """The phase that ends."""
        self.step_end = step_end
        """The step that ends, too; None where none does."""
        self.after_gap = after_gap
        """True if borders before it could not be recorded."""


class DeviceTimer:
    """Records and reads events of *accelerator*, by default that of this process."""

    def __init__(self, context: HookContext, accelerator: Accelerator | None = None) -> None:
        self._context = context
        device = accelerator or current_accelerator() or Accelerator("", None)
        self._device = device
        self.device_type = device.type
        """The type of the tensors whose collectives are timed here."""
        # Taken before install() patches it: an event that is not in C would pass the agent's own hook
        self._record: Any = device.PlainEvent.record
        self._free: list[Any] = []
        self._pending: deque[Waited | Border | HiddenWait] = deque()
        self._last_border: Border | None = None
        """The newest border that the device has come to."""
        self._border_ns = self._step_ns = 0
        """When the device came to it, and to the end of the last step; 0 before the first."""
        self._misses_border = self._is_announced = False
        self._polled_ns = 0
        self._writes = threading.Lock()
        self._compute_stream: Any = None
        self._side: Any = None
        """The stream that waits for the collectives of DDP's reducer."""
        self._waits: dict[int, tuple[Waited, ...]] = {}
        """Id of a stream -> its newest waits, of those that the compute stream has not waited for."""
        for name in (
            "issued", "reached_wait", "left_wait", "ran_here", "_waits_behind", "border", "mark",
            "mark_end", "waited_hidden",
        ):  # fmt: skip
            # events cost more than a record
            setattr(self, name, context.timed(getattr(self, name)))
        if device.type:
            context.on_border = context.guard.guarded(self.border)

    def install(self, patches: Patches) -> None:
        """Patches what waits for a stream: events on other streams, and the host."""
        event, module = self._device.Event, self._device.module
        if event is torch.Event:  # which is written in C, and cannot be patched
            return
        patches.wrap(event, "record", self._record_hook)
        patches.wrap(event, "wait", self._wait_hook)
        waits_of: tuple[tuple[Any, Callable[..., tuple[Waited, ...]]], ...] = (
            (event, lambda done: getattr(done, _BEHIND, ())),
            (getattr(module, "Stream", None), lambda at: self._waits.get(at.stream_id, ())),
            (module, lambda *_: tuple(chain(*self._waits.values()))),
        )
        for owner, waits in waits_of:
            if hasattr(owner, "synchronize"):  # a young backend may lack it
                patches.wrap(owner, "synchronize", self._synchronize_hook(waits))

    def mark_compute_stream(self) -> None:
        """Takes the current stream for the one in which the model computes."""
        if self._device.is_initialized():
            self._compute_stream = self._device.current_stream()

    def captures(self) -> bool:
        """Returns whether a graph is captured. A collective issued then does not run: no record."""
        return bool(self._device.is_current_stream_capturing())

    def border(self, phase: int, step_end: StepEnd | None) -> None:
        """Records that *phase* ends here on the compute stream, and with *step_end* a step."""
        if self._compute_stream is None:
            self.mark_compute_stream()
            if self._compute_stream is None:
                return
        if not self._is_announced:  # that steps are timed on the device: the first end comes late
            self._is_announced = True
            now_ns = time.monotonic_ns()
            self._context.write(now_ns, Kind.PHASE, 0, phase, _ON_DEVICE, 0, 0, now_ns, 0, 0, 0)
        if len(self._pending) >= _POOL or self._device.is_current_stream_capturing():
            self._misses_border = True
            return
        if time.monotonic_ns() - self._polled_ns > _POLL_NS:
            self.poll()  # as in a long evaluation, which ends no step
        border = Border(phase, step_end, after_gap=self._misses_border)
        border.left = self._mark(self._compute_stream)  # the device may pass it before this returns
        self._pending.append(border)
        self._misses_border = False

    def issued(self, entry: Entry) -> None:
        """Records an event where *entry*'s collective was issued."""
        entry[EVENT] = self._mark()

    def reached_wait(self, entries: Sequence[Entry]) -> tuple[Sequence[Entry], Any] | None:
        """Records that the stream is about to wait; None where *entries* are not timed on the device."""
        if self._device.is_current_stream_capturing():
            return None
        for entry in entries:
            if entry[EVENT] is None:
                return None
        if len(entries) == 1 and not entries[0][WORD] & _IS_ASYNC:
            # a backend may run it on this stream, before the wait
            return entries, entries[0][EVENT]
        return entries, self._mark()

    def left_wait(self, waiting: tuple[Sequence[Entry], Any]) -> None:
        """Records that the stream has left the wait."""
        entries, reached = waiting
        # Up to the number: _write_stalls reads no later field of an entry
        targets = entries or [[self._context.head_word, 0, 0, 0, 0]]
        wait = Waited(self._side_stream(), reached, self._mark(), targets, (), time.monotonic_ns())
        # where a control step issued it, only how long the stream stands still is known
        self._keep(wait if entries else Waited(wait.stream, reached, wait.left, [], (wait,)))

    def ran_here(self, entry: Entry) -> None:
        """Records the end of a synchronous collective that the current stream runs itself."""
        stream, reached, left = self._side_stream(), entry[EVENT], self._mark()
        self._keep(Waited(stream, reached, left, [entry], (), time.monotonic_ns()))

    def mark(self) -> Any:
        """Returns an event on the compute stream; None where none can be recorded now."""
        is_ready = self._compute_stream is not None and len(self._pending) < _POOL
        if not is_ready or self._device.is_current_stream_capturing():
            return None
        return self._mark(self._compute_stream)

    def mark_end(self, future: Any) -> Any:
        """Returns an event at the end of *future*'s work; None where the host would wait for it."""
        if not future.done():
            return None
        # On a stream of the agent's own: future.wait() would delay the kernels of the script's stream
        if self._side is None:
            self._side = self._device.module.Stream()
        with self._device.module.stream(self._side):
            future.wait()  # lets this stream wait, as the host knows the work to be enqueued
        return self._mark(self._side)

    def waited_hidden(self, wait: HiddenWait) -> None:
        """Records that the compute stream may have waited for the collectives of *wait* up to here."""
        wait.left = self.mark()
        if wait.left is not None:
            is_whole = len(wait.buckets) == wait.calls and all(b.is_known for b in wait.buckets)
            if not is_whole or self._last_border is None:
                wait.buckets = ()
            self._pending.append(wait)

    def poll(self) -> None:
        """Writes which waits have ended, but not in a capture of a graph, which a query would end."""
        if self._compute_stream is None:
            self.mark_compute_stream()  # no framework has told it: that of the optimizer
        if self._pending and not self._device.is_current_stream_capturing():
            self.write_ended()

    def write_ended(self) -> None:
        """Writes a record of every wait whose events have completed, in any thread. Never blocks."""
        pending = self._pending
        # Without waiting: the heartbeat's thread may hold the lock, and a step would last longer
        if not self._writes.acquire(blocking=False):
            return
        try:
            self._polled_ns = time.monotonic_ns()
            while pending:
                if not pending[0].left.query():
                    if isinstance(pending[0], Border):
                        pending[0].before_ns = self._polled_ns
                    return
                buckets = getattr(pending[0], "buckets", ())  # which end on another stream
                if buckets and not all(bucket.end.query() for bucket in buckets):
                    return
                wait = pending.popleft()
                if isinstance(wait, Border):
                    self._write_border(wait)
                elif isinstance(wait, HiddenWait):
                    (self._write_buckets if wait.buckets else self._write_hidden)(wait)
                elif wait.entries:
                    self._write_done(wait)
                elif wait.stream is None:
                    self._write_stalls(wait)
                # waits of other streams may still read the events of theirs
                if isinstance(wait, Waited) and wait.stream is None:
                    self._free.extend((wait.reached, wait.left))
        finally:
            self._writes.release()

    # ---- waits between streams ----------------------------------------------------------------

    def _wait_hook(self, original: Any) -> Callable[..., Any]:
        """Returns ``Event.wait`` that times waits for streams which waited for collectives."""
        context = self._context

        def wait_with_hook(event: Any, stream: Any = None) -> Any:
            other_waits = getattr(event, _BEHIND, None)
            if other_waits and context.mode == ON:
                for wait in other_waits:
                    if not wait.passed:
                        return self.waits_for(other_waits, stream, lambda at: original(event, at))
            at = self._find_stream() if stream is None else stream
            return original(event) if at is None else original(event, at)

        return wait_with_hook

    def _synchronize_hook(self, waits_of: Callable[..., tuple[Waited, ...]]) -> Callable[[Any], Any]:
        """Returns a hook on a function in which the host waits for streams with the waits *waits_of*.

        Nothing is enqueued meanwhile, so the compute stream stands still as if it waited itself.
        """
        context = self._context

        def hook_function(original: Any) -> Callable[..., Any]:
            def synchronize_with_hook(*args: Any, **kwargs: Any) -> Any:
                compute = self._compute_stream
                if not self._waits or context.mode != ON or compute is None:
                    return original(*args, **kwargs)
                other_waits: tuple[Waited, ...] = ()
                try:
                    # A background thread that waits does not keep the training thread from enqueueing
                    other_waits = waits_of(*args, **kwargs) if not context.is_apart() else ()
                except context.guard.CAUGHT as error:
                    context.guard.note(error, "synchronize")
                if not other_waits:
                    return original(*args, **kwargs)
                return self.waits_for(other_waits, compute, lambda _: original(*args, **kwargs))

            return synchronize_with_hook

        return hook_function

    def waits_for(self, earlier: tuple[Waited, ...], stream: Any, wait: Callable[[Any], Any]) -> Any:
        """Runs and times *wait*, which makes *stream* wait for another one with the waits *earlier*."""
        note, reached = self._context.guard.note, None
        stream = self._find_stream() if stream is None else stream
        try:
            earlier = tuple([w for w in earlier if not w.passed and w.depth < _DEPTH])
            if earlier and stream is not None and not self._device.is_current_stream_capturing():
                reached = self._mark(stream)
        except self._context.guard.CAUGHT as error:
            note(error, "Event.wait")
        # Outside of both guards: an error of the wait itself belongs to the script
        result = wait(stream)
        if reached is not None:
            try:
                self._waits_behind(earlier, stream, reached)
            except self._context.guard.CAUGHT as error:
                note(error, "Event.wait")
        return result

    def _waits_behind(self, other_waits: tuple[Waited, ...], stream: Any, reached: Any) -> None:
        self._keep(Waited(self._side_stream(stream), reached, self._mark(stream), [], other_waits))

    def _record_hook(self, original: Any) -> Callable[..., Any]:
        """Returns ``Event.record`` that notes at the event the waits that its stream has enqueued."""
        note, caught = self._context.guard.note, self._context.guard.CAUGHT

        def record_with_hook(event: Any, stream: Any = None) -> Any:
            at = self._find_stream() if stream is None else stream
            try:
                if self._waits and at is not None:
                    waits = self._waits.get(at.stream_id, ())
                    # Also without waits: an event recorded again would keep its earlier ones
                    if waits or getattr(event, _BEHIND, None):
                        setattr(event, _BEHIND, waits)
            except caught as error:
                note(error, "Event.record")
            return original(event) if at is None else original(event, at)

        return record_with_hook

    # ---- helpers ------------------------------------------------------------------------------

    def _find_stream(self) -> Any:
        """Returns the current stream, which torch looks up in 15 functions; None where unknown."""
        try:
            return None if self._compute_stream is None else self._device.current_stream()
        except self._context.guard.CAUGHT as error:  # the script's own call finds it, or raises
            self._context.guard.note(error, "current_stream")
            return None

    def _side_stream(self, stream: Any = None) -> int | None:
        """Returns the id of *stream*, by default the current one; None for the compute stream."""
        if self._compute_stream is None:
            return None
        if stream is None:
            stream = self._device.current_stream()
        here = self._compute_stream
        if stream is here:
            return None
        number = int(stream.stream_id)  # two streams of two devices may have the same
        is_compute = number == here.stream_id and stream.device_index == here.device_index
        return None if is_compute else number

    def _mark(self, stream: Any = None) -> Any:
        event = self._free.pop() if self._free else self._device.PlainEvent(enable_timing=True)
        self._record(event, self._device.current_stream() if stream is None else stream)
        return event

    def _keep(self, wait: Waited) -> None:
        if wait.stream is None:
            for passed_wait in wait.behind:
                passed_wait.pass_all()
            for stream, waits in list(self._waits.items()):
                if not (left_waits := tuple([w for w in waits if not w.passed])):
                    del self._waits[stream]
                elif len(left_waits) < len(waits):
                    self._waits[stream] = left_waits
        else:
            # A new tuple: events hold the previous one as it was when they were recorded
            self._waits[wait.stream] = (*self._waits.get(wait.stream, ())[1 - _REMEMBERED :], wait)
        if len(self._pending) >= _POLL_AT:
            self.poll()  # no step has polled for long, as in an evaluation
        # Without a limit, a device that hangs would fill the memory of the host with events
        if len(self._pending) < _POOL:
            self._pending.append(wait)

    def _write_border(self, border: Border) -> None:
        """Writes the phase that ends at *border*, if its beginning is known, and the step."""
        write, last_border, reached = self._context.write, self._last_border, border.before_ns
        if last_border is not None:
            elapsed_ns = _elapsed_ns(last_border.left, border.left)
            # a clock that runs fast would carry all later borders away from the host's
            reached = max(reached, self._border_ns + elapsed_ns - elapsed_ns // _DRIFT)
            self._free.append(last_border.left)
        # The host has seen the event complete, so the device cannot come to it later
        reached = min(reached, time.monotonic_ns())
        if last_border is not None and not border.after_gap:
            # fmt: off
            write(reached, Kind.PHASE, 0, border.phase, _ON_DEVICE, 0, 0,
                  self._border_ns, 0, 0, max(0, reached - border.entered_ns))
            # fmt: on
        if border.step_end is not None:
            outcome, flags, step, start, micro_steps, engine = border.step_end
            # fmt: off
            write(reached, Kind.STEP, outcome, 0, flags | _ON_DEVICE, 0, 0,
                  step, self._step_ns or start, micro_steps, engine)
            # fmt: on
            self._step_ns = reached
        self._last_border, self._border_ns = border, reached

    def _host_ns(self, event: Any, earliest_ns: int = 0) -> int:
        """Returns when, by the host's clock, the device came to *event*: not before *earliest_ns*."""
        last_border = self._last_border
        if last_border is None:
            return earliest_ns
        at: int = self._border_ns + round(last_border.left.elapsed_time(event) * 1e6)
        self._border_ns += max(0, earliest_ns - at)  # all that follows came so much later, too
        return max(at, earliest_ns)

    def _write_hidden(self, wait: HiddenWait) -> None:
        blocked = max(0, _elapsed_ns(wait.reached, wait.left))
        if wait.copied and (speed := self._device.memory_speed):  # a copy reads and writes
            blocked = max(0, blocked - round(2e9 * wait.copied / speed))
        self._free.extend((wait.reached, wait.left))
        # fmt: off
        self._context.write(time.monotonic_ns(), Kind.STALL, Op.ALL_REDUCE, Phase.BACKWARD,
                            Flag.DEVICE, wait.group, 0, blocked, wait.calls,
                            self._host_ns(wait.reached), wait.sequence)
        # fmt: on

    def _write_buckets(self, wait: HiddenWait) -> None:
        span, at = max(0, _elapsed_ns(wait.reached, wait.left)), wait.reached
        issued = (b.entry[ISSUED_NS] - _elapsed_ns(at, b.entry[EVENT]) for b in wait.buckets)
        origin = self._host_ns(at, max(issued))
        ends_ns = [_elapsed_ns(wait.reached, bucket.end) for bucket in wait.buckets]
        waits = waits_of_each(span, ends_ns, [bucket.copy_size for bucket in wait.buckets])
        free_ns = -(1 << 62)
        for bucket, end_ns, waited in zip(wait.buckets, ends_ns, waits, strict=True):
            entry = bucket.entry
            event_ns, called_ns = _elapsed_ns(at, entry[EVENT]), entry[ISSUED_NS] - origin
            ready_ns = max(event_ns, called_ns + entry[HELD_NS])
            start = max(ready_ns, free_ns)  # a group runs one after the other
            leave = min(_elapsed_ns(wait.reached, bucket.left), end_ns)  # later, the host was slow
            done = _DONE | entry[WORD]
            if origin + end_ns > bucket.recorded_ns + _NO_STALL_NS:  # else it had ended before
                done |= _span_word(max(event_ns, called_ns, free_ns), start, end_ns)
            # fmt: off
            self._context.ring.write(origin + end_ns, done, entry[PLACE], entry[NBYTES], origin + start,
                                     waited + max(0, leave - ready_ns), entry[SEQUENCE])
            # fmt: on
            free_ns = end_ns
            self._free.extend((entry[EVENT], bucket.left, bucket.end))
        self._free.extend((wait.reached, wait.left))

    def _write_done(self, wait: Waited) -> None:
        blocked = max(0, round(wait.reached.elapsed_time(wait.left) * 1e6))
        elapsed, earliest_ns = [], 0
        for entry in wait.entries:
            is_same = entry[EVENT] is wait.reached
            since_ns = blocked if is_same else round(entry[EVENT].elapsed_time(wait.left) * 1e6)
            elapsed.append(max(0, since_ns))
            # the device comes to each after the host has issued it
            earliest_ns = max(earliest_ns, entry[ISSUED_NS] + elapsed[-1])
        end_ns = self._host_ns(wait.left, earliest_ns)
        # a stream that did not stall, or that waited for its host, passed after the end: an upper bound
        end_is_known = blocked > _NO_STALL_NS and end_ns > wait.left_ns + _NO_STALL_NS
        # of several, each but the last may have ended before, or all are one kernel
        end_is_known &= len(wait.entries) == 1
        # A side stream alone delays nothing: _write_stalls counts waits for it
        if wait.stream is not None:
            blocked = 0
        for entry, elapsed_ns in zip(wait.entries, elapsed, strict=True):
            # it does not begin before the host has launched it
            earliest_ns = max(end_ns - elapsed_ns, entry[ISSUED_NS])
            began_ns = min(end_ns, max(earliest_ns, entry[ISSUED_NS] + entry[HELD_NS]))
            head_word = _DONE | entry[WORD]
            if end_is_known:
                head_word |= _span_word(earliest_ns, began_ns, end_ns)
            # Freed here as well, an event that serves as both would be in the pool twice
            if entry[EVENT] is wait.reached:
                blocked = min(blocked, end_ns - began_ns)
            else:
                self._free.append(entry[EVENT])
            # fmt: off
            self._context.ring.write(end_ns, head_word, entry[PLACE], entry[NBYTES], began_ns,
                                     blocked, entry[SEQUENCE])
            # fmt: on
            blocked = 0  # once, for all of them

    def _write_stalls(self, wait: Waited) -> None:
        """Writes for which collectives of other streams the compute stream stood still, and how long."""
        origin, now_ns, until_ns = wait.reached, time.monotonic_ns(), 0
        stalled = max(0, round(origin.elapsed_time(wait.left) * 1e6))
        spans = [span for inner in wait.behind for span in inner.stalls(origin, 0, stalled)]
        # Before the first border no clock is known, and a time without it would pass for one
        reached_ns = self._host_ns(origin) if spans else 0
        for start, end_ns, entry in sorted(spans, key=itemgetter(0)):  # of several streams at once
            if end_ns > until_ns:
                head_word = _STALL | entry[WORD]
                start, until_ns = max(start, until_ns), end_ns
                # fmt: off
                self._context.ring.write(now_ns, head_word, entry[PLACE], end_ns - start, 0,
                                         reached_ns and reached_ns + start, entry[SEQUENCE])
                # fmt: on


def _span_word(earliest_ns: int, began_ns: int, end_ns: int) -> int:
    """Returns SPAN_KNOWN where a collective whose end is known began at *began_ns*, or just before."""
    return _SPAN_KNOWN if began_ns - earliest_ns <= _MAX_UNSURE * (end_ns - began_ns) else 0


def _elapsed_ns(start_event: Any, end_event: Any) -> int:
    """Returns the time between two events; negative where *end_event* came before *start_event*."""
    return round(float(start_event.elapsed_time(end_event)) * 1e6)
