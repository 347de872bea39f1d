"""The state that all hooks of one process share: what writes a record, the mode, the phase, the unit.

Every hook reads the mode on every call:

======  ==========================================================================
OFF     hooks only call through (detached, not started, forked child)
IDLE    a control step: collectives are counted, nothing is timed. The overhead of
        the agent is the difference between IDLE and ON steps
ON      everything is recorded
======  ==========================================================================
"""

import importlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from zeromon.ring.buffer import PACKED, NameKind, RingWriter, Slots, needs_record_crc
from zeromon.ring.codes import Flag, Kind, Phase
from zeromon.ring.events import RECORD_SIZE, pack_head, pack_place
from zeromon.ring.model_metadata import BACKGROUND
from zeromon_agents.runtime.guard import Guard

compiled_hooks: Any = None
"""The hot paths in C; None where they are not compiled, and on machines whose records need a CRC."""
if not needs_record_crc() and os.environ.get("ZEROMON_PURE") != "1":
    with suppress(ImportError):
        compiled_hooks = importlib.import_module("zeromon_agents.runtime.compiled_hooks")

P = ParamSpec("P")
R = TypeVar("R")

OFF, IDLE, ON = 0, 1, 2

StepEnd = tuple[int, int, int, int, int, int]
"""Outcome, flags, step, start on the host's clock, micro-steps and engine, as in a record of a step."""

Entry = list[Any]
"""A collective under way. A list, because a callback on another thread fills in END."""

WORD, PLACE, NBYTES, ISSUED_NS, SEQUENCE, END, EVENT, HELD_NS = range(8)
"""The fields of an :data:`Entry`. WORD holds op, phase and flags where a record's head has them.

HELD_NS is how long the issuing call took, or -1 for a synchronous collective on the CPU, which blocks
to its end."""


_PHASE_WORDS = [pack_head(0, phase=phase) for phase in Phase]
_AHEAD_WORD = pack_head(0, flags=Flag.AHEAD)


_Fields = Callable[[int, int, int, int, int, int, int, int, int, int, int], None]


@dataclass(slots=True, eq=False)
class HookContext:
    """The state that hooks read and write; one per process."""

    ring: RingWriter
    guard: Guard
    write: _Fields = field(init=False)
    mode: int = OFF
    calls: int = 0
    """Calls of functions that :func:`~zeromon_agents.runtime.around.around` wraps."""
    sampled_calls: int = 0
    """Those among them that were timed."""
    sampled_ns: int = 0
    """Nanoseconds of the agent's work in those calls, without the function that is wrapped."""
    spent_ns: int = 0
    """Nanoseconds that the training thread spent on the agent's samples and accounts."""
    detailed: bool = False
    """True if this step also takes the samples that are too expensive for every step."""
    timing: bool = False
    """True if the wrapped calls of this step are timed."""
    phase: int = Phase.OTHER
    """The phase of the step; :meth:`enter` changes it, and :attr:`head_word` with it."""
    on_border: Callable[[int, StepEnd | None], None] | None = None
    """Called with the phase that ends, and with the step if that ends, too. It must not raise."""
    ahead: bool = False
    """True if a collective issued now is a prefetch; :meth:`prefetch` changes it."""
    head_word: int = 0
    """Phase and flags of a collective issued now, at their places in a record's head."""
    engine: int = 0
    """Number of the DeepSpeed engine that is running, 0 for none."""
    unit: int = 0
    """Place of the unit that is communicating, as :meth:`unit_id` returns it; 0 for none."""
    step: int = 0
    steps_before: int = 0
    """Steps that the run had taken when the agent was attached."""
    thread: int = 0
    """The thread of the last backward, which is that of training; 0 before the first."""
    backward_thread: int = 0
    """The thread of autograd's own, in C++, that issued a collective last; 0 before the first."""
    recorder: Any = None
    """Writes records in C; None where :data:`compiled_hooks` is None."""
    _units: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if compiled_hooks is not None and self.ring.slots.pack is PACKED:
            _, pack, records, mask = self.ring.slots
            following = self.ring.slots.following()
            self.recorder = compiled_hooks.Recorder(records, self.ring.muted, mask + 1, following)
            self.ring.slots = Slots(self.recorder.following, pack, records, mask)
            self.ring.write, self.write = self.recorder.write, self.recorder.write_fields
            return
        # Between two hooks the training displaces what the last one had in the caches, so that
        # each Python function is as slow as at its first call. This is one function; hooks of
        # collectives have none.
        next_slot, pack, records, mask = self.ring.slots
        # A list that muting fills: of a bool, the closure would keep the value of before a fork
        muted = self.ring.muted

        # fmt: off
        def write_record(t_ns: int, kind: int, op: int, phase: int, flags: int, group: int, unit: int,
                  a: int, b: int, c: int, d: int) -> None:
            if not muted:
                n = next_slot()
                pack(records, (n & mask) * RECORD_SIZE, n, t_ns,
                     kind | op << 8 | phase << 16 | flags << 24, group | unit, a, b, c, d, n)
        # fmt: on
        self.write = write_record

    def is_apart(self) -> bool:
        """Returns whether the caller runs on another thread of the program than that of training.

        Autograd's own threads run parts of backward. They are C++ threads: Python lists only those that
        it started, and a stand-in for one that it was asked about.
        """
        caller = threading.get_ident()
        # Not `current_thread()`: it makes a stand-in for each of autograd's threads, and keeps it
        listed = threading._active.get(caller)  # type: ignore[attr-defined]
        is_python = listed is not None and type(listed) is not threading._DummyThread
        if not is_python:
            self.backward_thread = caller
        return is_python and self.thread not in (0, caller)

    def enter(self, phase: int, step_end: StepEnd | None = None) -> None:
        """Begins *phase* of the step, or of the next one after *step_end*."""
        # `prefetch` enters the same phase at each gather, and a border costs an event on the device
        if self.on_border is not None and (phase != self.phase or step_end is not None):
            self.on_border(self.phase, step_end)
        self.phase = phase
        self.head_word = _PHASE_WORDS[phase] | (_AHEAD_WORD if self.ahead else 0)

    def prefetch(self, *, ahead: bool) -> None:
        """Says whether collectives issued from now on are prefetches."""
        self.ahead = ahead
        self.enter(self.phase)

    def unit_id(self, fqn: str, describe: dict[str, Any]) -> int:
        """Returns the id of the unit *fqn* at its place in records; 0 when the name table is full."""
        unit = self._units.get(fqn)
        if unit is None:
            number = self.ring.name(NameKind.UNIT, {"fqn": fqn, **describe})
            self._units[fqn] = unit = pack_place(0, number)
        return unit

    def place_apart(self, group: int) -> int:
        """Returns group and unit of a collective that another thread than that of training issues."""
        return group | self.unit_id(BACKGROUND, {})

    def add_metadata(self, **metadata: Any) -> None:
        """Writes metadata of this rank. A later value of a key replaces an earlier one."""
        self.ring.name(NameKind.META, metadata)

    def sample(self, began_ns: int, calls: int = 0) -> None:
        """Adds what a hook did since *began_ns*, a clock that stands while :meth:`timed` work runs."""
        self.sampled_calls += calls
        self.sampled_ns += time.perf_counter_ns() - self.spent_ns - began_ns

    @property
    def hooks_ns(self) -> int:
        """Nanoseconds of the agent's work in all wrapped calls, by those that were timed."""
        return self.sampled_ns * self.calls // max(1, self.sampled_calls)

    def timed(self, work: Callable[P, R]) -> Callable[P, R]:
        """Returns *work* wrapped so that its duration is added, once, to :attr:`spent_ns`."""
        if self.recorder is not None:
            in_c: Callable[P, R] = compiled_hooks.Timed(self, work, work, self.recorder)
            return in_c

        def timed_work(*args: P.args, **kwargs: P.kwargs) -> R:
            began_ns = time.perf_counter_ns() - self.spent_ns
            try:
                return work(*args, **kwargs)
            finally:  # not added: what such a call inside of this one has added is contained
                self.spent_ns = time.perf_counter_ns() - began_ns

        return timed_work

    def text(self, message: str) -> int:
        """Stores *message*, returns its id, which a record can carry; 0 when the name table is full."""
        return self.ring.name(NameKind.TEXT, {"text": message[:4000]})

    def emit(
        self, kind: Kind, a: int = 0, b: int = 0, c: int = 0, d: int = 0, *, op: int = 0, group: int = 0
    ) -> None:
        """Writes a record of the current time, phase and unit, from a hook off the hot path."""
        self.write(time.monotonic_ns(), kind, op, self.phase, 0, group, self.unit, a, b, c, d)
