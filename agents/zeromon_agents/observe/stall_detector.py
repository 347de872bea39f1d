"""Finds the collectives that a stalled rank waits in and that the hooks have not seen.

The hooks do not see what C++ issues (the reducer of DDP, compiled graphs), nor what was issued before
the agent was attached. The c10d Flight Recorder lists what was issued and has not retired, with time and
sizes; a group's sequence number says how far this rank has come in the group. The heartbeat reads both,
and only while nothing moves. Where the Flight Recorder is off, only the sequence numbers are known.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

from zeromon.ring.events import Flag, Kind, pack_head, pack_place
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.process_groups import Group, sequence_number, text_of
from zeromon_agents.observe.untraced import op_of, payload_bytes, read_flight_recorder
from zeromon_agents.runtime.guard import frames_outwards
from zeromon_agents.runtime.hook_context import HookContext

_QUIET_ATTACHED = 2
_QUIET_LAUNCHED = 5
"""Checks, a second apart, without progress before the Flight Recorder is read."""
_USUAL_STEPS = 3
"""A launched rank is not quiet before this many of its usual steps have passed."""
_MAX_STACK_WAIT = 64
_LONG_NS = 5_000_000_000
_MAX_FRAMES = 24
_MAX_STACKS = 50
_BATON = "/torch/utils/file_baton.py"

Flying = tuple[int, int, int]
"""Operation, issue time on CLOCK_MONOTONIC in ns, bytes."""


class StallDetector:
    """Detects that nothing moves, and writes the collectives in flight and the Python stack."""

    def __init__(
        self,
        context: HookContext,
        collectives: Collectives,
        evaluates: Callable[[], bool] = lambda: False,
        *,
        attached: bool,
    ) -> None:
        self._context = context
        self._collectives = collectives
        self._evaluates = evaluates
        """Returns whether a model is in evaluation mode."""
        self._attached = attached
        self._last_numbers: dict[int, int] | None = None
        """Group of training -> sequence number, at the last check that no step had ended before."""
        self._quiet = 0
        self._step = 0
        self._checks_of_step = 0
        self._checks_of_steps: deque[int] = deque(maxlen=8)
        """Checks, a second apart, that the newest steps took."""
        self._stack_after = 0
        """Quiet checks before the stack is written again: twice as many each time."""
        self._written: dict[tuple[int, int], int] = {}
        """(group, sequence number) -> head word of a collective that was written as in flight."""
        self._stack: list[str] = []
        self._stacks = 0

    def check(self) -> bool:
        """Returns whether the rank is stalled. Called once a second, at first right after attaching."""
        is_first = self._last_numbers is None
        self._checks_of_step += 1
        if self._context.step != self._step:
            if self._step:  # the first step contains the start-up
                self._checks_of_steps.append(self._checks_of_step)
            self._step, self._checks_of_step, self._quiet = self._context.step, 0, 0
            if not (is_first and self._attached):
                # Process groups are not touched while steps end: the last reference to one that the
                # program lets go of would be dropped here, and this thread would destroy it.
                return self._end_stall()
        groups = [(g, pg) for g in self._groups() if (pg := g.ref()) is not None]
        numbers = {group.id: self._number(group, pg) for group, pg in groups}
        of_training = {group.id: numbers[group.id] for group, _ in groups if not group.apart}
        self._quiet = 0 if of_training != self._last_numbers else self._quiet + 1
        self._last_numbers = of_training
        if self._quiet < self._limit() and not (is_first and self._attached):
            return self._end_stall()
        flying = self._in_flight(groups)
        self._write_progress(numbers)
        if is_first and not any(time.monotonic_ns() - e[1] > _LONG_NS for e in flying.values()):
            return False
        self._retire_flying(set(flying))
        self._write(flying)
        return True

    def _end_stall(self) -> bool:
        """Takes back what was written of a stall that is over. Returns that the rank is not stalled."""
        self._stack_after = 0
        self._retire_flying(set())
        self._write_stack([])
        return False

    def _limit(self) -> int:
        """Returns how many checks without progress are a stall."""
        if self._attached:
            return _QUIET_ATTACHED
        checks = sorted(self._checks_of_steps)
        usual_checks = checks[len(checks) // 2] if checks else 0
        return max(_QUIET_LAUNCHED, _USUAL_STEPS * usual_checks)

    def _number(self, group: Group, pg: Any) -> int:
        """Returns the number of the newest collective of *group*, as the records of this rank count."""
        return sequence_number(pg) - self._number_shift(group)

    def _number_shift(self, group: Group) -> int:
        """Returns what records of this rank leave out: a launched agent counts from its first sight."""
        return 0 if self._attached else group.base

    def _in_flight(self, groups: list[tuple[Group, Any]]) -> dict[tuple[int, int], Flying]:
        """Returns (group, number) -> what is in flight, numbered as the records of this rank are."""
        shifts = {group.id: self._number_shift(group) for group, _ in groups}
        flying = in_flight({text_of(pg, "group_name") or "": group for group, pg in groups})
        return {(group, number - shifts[group]): e for (group, number), e in flying.items()}

    def _groups(self) -> list[Group]:
        return list(self._collectives.groups.values())

    def _write(self, flying: dict[tuple[int, int], Flying]) -> None:
        write = self._context.ring.write
        ours = {(group.id, number) for group in self._groups() for number in group.numbers}
        for key, (op, issued_ns, nbytes) in flying.items():
            if key not in ours and key not in self._written:
                head_word = self._written[key] = pack_head(0, op, self._context.phase, Flag.INFERRED)
                issued = pack_head(Kind.ISSUED) | head_word
                write(issued_ns, issued, pack_place(key[0]), nbytes, key[1], 0, 0)

    def _write_progress(self, numbers: dict[int, int]) -> None:
        """Writes the sequence number of each group, and the main thread's stack."""
        now_ns = time.monotonic_ns()
        for group in self._groups():
            if group.id in numbers:
                head_word, seen_calls = pack_head(Kind.GROUP_SEQUENCE), group.issued + group.extra
                self._context.ring.write(
                    now_ns, head_word, pack_place(group.id), numbers[group.id], seen_calls, 0, 0
                )
        if self._attached or self._quiet >= self._stack_after:
            self._stack_after = self._quiet + min(self._quiet, _MAX_STACK_WAIT)
            self._write_stack(main_stack())

    def _write_stack(self, stack: list[str]) -> None:
        if stack != self._stack and self._stacks < _MAX_STACKS:
            self._stack, self._stacks = stack, self._stacks + bool(stack)
            evaluating = bool(stack) and self._evaluates()
            lock = awaited_lock() if stack else ""
            self._context.add_metadata(stack=stack, evaluating=evaluating, lock=lock)

    def _retire_flying(self, still: set[tuple[int, int]]) -> None:
        """Writes the end of collectives no longer in flight, without a duration."""
        now_ns = time.monotonic_ns()
        for key in self._written.keys() - still:
            head_word = pack_head(Kind.DONE, flags=Flag.FAILED) | self._written.pop(key)
            self._context.ring.write(now_ns, head_word, pack_place(key[0]), 0, now_ns, 0, key[1])


def in_flight(groups: dict[str, Group]) -> dict[tuple[int, int], Flying]:
    """Returns (group, torch's own number) -> what is in flight.

    The source is torch's Flight Recorder; *groups* are by the name that torch gives them.
    """
    collectives = {}
    shift = time.monotonic_ns() - time.time_ns()
    for entry in read_flight_recorder(only_active=True):
        group = groups.get(str((entry.get("process_group") or ("",))[0]))
        if group is None or entry.get("retired") or entry.get("is_p2p"):
            continue
        op = op_of(str(entry.get("profiling_name", "")))
        issued = int(entry.get("time_created_ns") or 0) + shift
        key = group.id, int(entry.get("collective_seq_id", 0))
        collectives[key] = int(op), issued, payload_bytes(op, entry)
    return collectives


def main_stack() -> list[str]:
    """Returns the main thread's Python stack, outermost call first: ``train.py:41 in main``."""
    return [
        f"{f.f_code.co_filename[-120:]}:{f.f_lineno} in {f.f_code.co_name[:60]}"
        for f in islice(_main_frames(), _MAX_FRAMES)
    ][::-1]


def awaited_lock() -> str:
    """Returns the lock file of torch's extension cache that the main thread waits for; else ""."""
    for frame in islice(_main_frames(), _MAX_FRAMES):
        if frame.f_code.co_filename.endswith(_BATON) and frame.f_code.co_name == "wait":
            return str(getattr(frame.f_locals.get("self"), "lock_file_path", ""))
    return ""


def _main_frames() -> Iterator[FrameType]:
    """The frames of the main thread, the innermost first."""
    return frames_outwards(sys._current_frames().get(threading.main_thread().ident or 0))
