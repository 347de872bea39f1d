"""Finds the collectives that the hooks have not seen: all, and those that a stalled rank waits in.

The hooks do not see what C++ issues (the reducer of DDP, compiled graphs), nor what was issued before
the agent was attached. The c10d Flight Recorder lists what was issued and has not retired, with time and
sizes; a group's sequence number says how far this rank has come in the group. The heartbeat reads both,
and only while nothing moves. Where the Flight Recorder is off, only the sequence numbers are known.
"""

import functools
import math
import pickle
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any

import torch

from zeromon.ring.codes import ITEM_BYTES, Flag, Kind, Op, Phase, Untimed, operation_by_name
from zeromon.ring.events import pack_head, pack_place
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.process_groups import Group, sequence_number, text_of
from zeromon_agents.observe import accelerator
from zeromon_agents.runtime.guard import Guard, frames_outwards
from zeromon_agents.runtime.hook_context import OFF, HookContext

# ---- collectives that no hook sees ---------------------------------------------------------------

# A group's own sequence number says how many there were. Their operation is known only
#
# * where torch calls a hook at every collective of a group, from :class:`Dispatched`;
# * in the first steps, from the c10d Flight Recorder, which lists each collective;
# * for DDP's gradient buckets and what it agrees on beside them, from the backend.
#
# All others are reported as counted, with an unknown operation.

WARM_UP_STEPS = 3
_MAX_ENTRIES = 400  # a dump costs about 9 us per entry, once, in a warm-up step

Reducers = Callable[[int, int], list[tuple[Op, int, int, int]] | None]
"""Names a number of collectives of a group: see :meth:`~.hooks.backend.Backend.reducers_sent`."""


class UntracedCollectives:
    """Explains, at the end of a step, the sequence numbers that no hook saw."""

    def __init__(self, context: HookContext, collectives: Collectives, reducers: Reducers) -> None:
        self._context = context
        self._collectives = collectives
        self._reducers = reducers
        self.dispatched = Dispatched(context)

    def account(self, step: int) -> None:
        """Writes what C++ has issued since the last call; *step* counts from the start of the agent."""
        pg_map = torch.distributed.distributed_c10d._world.pg_map
        # A group that only C++ uses passes no hook that would register it
        if len(pg_map) > len(self._collectives.groups):
            self._collectives.register_groups()
        flight: list[dict[str, Any]] | None = None
        for group in list(self._collectives.groups.values()):
            pg = group.ref()
            if pg is None:
                continue
            sequence = sequence_number(pg) - group.base
            # The MPI and fake backends keep no sequence number, so what the hooks missed is unknown
            if sequence < 0:
                continue
            hooked = group.issued + group.extra
            missing = sequence - hooked - group.explained
            if missing > 0:
                # Only after a miss: the hook would else run at each collective of every group
                self.dispatched.watch(group, pg)
                is_short = sequence + group.base < _MAX_ENTRIES
                # Reading the Flight Recorder queries its events, which ends the capture of a graph
                early = step <= WARM_UP_STEPS and not accelerator.is_capturing()
                if early and flight is None and is_short:
                    flight = read_flight_recorder()
                self._explain(group, pg, missing, flight)
            shift = group.base if self._collectives.attached else 0
            shifted = sequence + shift, hooked + shift
            self._context.emit(Kind.GROUP_SEQUENCE, *shifted, group=group.id)

    def _explain(self, group: Group, pg: Any, missing: int, flight: list[dict[str, Any]] | None) -> None:
        # Before the names: after an error below, every later step would report these again
        group.explained += missing
        # Taken in any case: what stays would be added to the calls of the next step
        dispatched = self.dispatched.take(group)
        sent = self._reducers(group.id, missing)
        cause, named = (Untimed.IN_CPP, []) if sent is None else (Untimed.REDUCER, sent)
        if flight:
            listed = self._from_flight_recorder(group, flight, text_of(pg, "group_name"))
            # The Flight Recorder overwrites its oldest entries: names that do not add up are incomplete
            if sum(calls for calls, _ in listed.values()) == missing:
                # the phase in which C++ issues it, as only the number of calls is known
                phases = {Op.ALL_REDUCE: Phase.BACKWARD}
                named = [(op, phases.get(op, Phase.OTHER), *s) for op, s in listed.items()]
        if dispatched and sum(calls for calls, _ in dispatched.values()) == missing:
            named = [(*key, *sums) for key, sums in dispatched.items()]
        if not named:
            named, cause = [(Op.NONE, Phase.OTHER, missing, 0)], Untimed.IN_CPP
        now_ns = time.monotonic_ns()
        for op, phase, calls, nbytes in named:
            # fmt: off
            self._context.write(now_ns, Kind.COUNTED, op, phase, 0, group.id, 0, calls, nbytes, cause, 0)
            # fmt: on

    def _from_flight_recorder(
        self, group: Group, flight: list[dict[str, Any]], name: str | None
    ) -> dict[Op, tuple[int, int]]:
        ours = group.seen_sequences
        if ours is None:
            return {}
        counts: Counter[Op] = Counter()
        nbytes: Counter[Op] = Counter()
        for entry in flight:
            number = entry.get("collective_seq_id", 0)
            group_name = (entry.get("process_group") or ("",))[0]
            if group_name != name or number <= group.base or number in ours or entry.get("is_p2p"):
                continue
            ours.add(number)  # counts once
            op = op_of(str(entry.get("profiling_name", "")))
            counts[op] += 1
            nbytes[op] += payload_bytes(op, entry)
        return {op: (counts[op], nbytes[op]) for op in counts}


def op_of(profiling_name: str) -> Op:
    """Returns the operation of a Flight Recorder name such as ``gloo:all_reduce``."""
    return operation_by_name(profiling_name.rpartition(":")[2])


def payload_bytes(op: Op, entry: dict[str, Any]) -> int:
    """Returns the payload S of a Flight Recorder entry in bytes: the unsharded size."""
    side = "output" if op == Op.ALL_GATHER else "input"
    sizes, dtypes = entry.get(f"{side}_sizes") or [], entry.get(f"{side}_dtypes") or []
    total = 0
    for position, size in enumerate(sizes):
        dtype = dtypes[position] if position < len(dtypes) else (dtypes or ["Byte"])[-1]
        total += math.prod(size) * ITEM_BYTES.get(dtype, 1)
    return total


def read_flight_recorder(*, only_active: bool = False) -> list[dict[str, Any]]:
    """Returns the Flight Recorder's entries without stack traces; [] where it is absent or off.

    torch keeps a recorder per backend: one function dumps NCCL's first one, another those of the other
    backends, since torch 2.14 by the backend's name. torch's C++ makes the pickle in this very call:
    nothing from outside the process is unpickled.
    """
    module = torch._C._distributed_c10d
    of_nccl = getattr(module, "_dump_nccl_trace", None)
    of_others = getattr(module, "_dump_fr_trace", None)
    dumps = [] if of_nccl is None else [of_nccl]
    if of_others is not None:
        # The backends that this process's groups use, by the names that these give themselves
        names = set()
        for pg in list(torch.distributed.distributed_c10d._world.pg_map):
            with suppress(RuntimeError, AttributeError):  # a group that is gone, or of Python's own
                names |= {pg._get_backend(device).name() for device in pg._device_types}
        by_name = [functools.partial(of_others, backend=name) for name in sorted(names)]
        # pybind functions have no signature to inspect; their docstring begins with it
        dumps += by_name if "backend:" in (of_others.__doc__ or "") else [of_others]
    options = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": only_active}
    contents = [pickle.loads(dump(**options)) for dump in dumps]
    return [entry for dump in contents if isinstance(dump, dict) for entry in dump.get("entries") or []]


HOOK_ID = 0x7A65726F6D6F6E
"""Ours among the hooks of a group, which run in the order of their numbers."""

Named = Counter[tuple[Op, int]]
"""(operation, phase) -> calls, and their bytes in a counter of its own."""


class Dispatched:
    """The hooks on the groups, and what they have seen of each."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._asked: set[int] = set()
        """The groups that were watched, also where torch has no such hooks."""
        self._groups: dict[int, Group] = {}
        self._calls: dict[int, Named] = {}
        self._bytes: dict[int, Named] = {}

    def watch(self, group: Group, pg: Any) -> None:
        """Registers the hook on *pg*, once; a torch without such hooks is left alone."""
        if group.id in self._asked:
            return
        self._asked.add(group.id)
        if hasattr(pg, "register_pre_hook"):
            self._calls[group.id], self._bytes[group.id] = Counter(), Counter()
            pg.register_pre_hook(HOOK_ID, self._hook(group))
            self._groups[group.id] = group

    def stop(self) -> None:
        """Removes every hook."""
        for group in self._groups.values():
            pg = group.ref()
            if pg is not None:
                with suppress(RuntimeError):
                    pg.unregister_pre_hook(HOOK_ID)
        self._groups.clear()

    def take(self, group: Group) -> dict[tuple[Op, int], tuple[int, int]]:
        """Returns (operation, phase) -> (calls, bytes) since the last call."""
        calls, nbytes = self._calls.get(group.id), self._bytes.get(group.id)
        if not calls or nbytes is None:
            return {}
        totals = {key: (count, nbytes[key]) for key, count in calls.items()}
        calls.clear()
        nbytes.clear()
        return totals

    def _hook(self, group: Group) -> Callable[[Any], None]:
        context, note = self._context, self._context.guard.note
        calls, nbytes = self._calls[group.id], self._bytes[group.id]
        group.matched = group.issued

        def count_call(args: Any) -> None:
            if context.mode == OFF:
                return
            try:
                if group.issued != group.matched:  # another hook counts this very call
                    if group.matched >= 0:
                        group.matched = group.issued
                    return
                op = operation_by_name(args.name.name)
                key = (op, context.phase)
                calls[key] += 1
                nbytes[key] += _announced_bytes(op, args, group.size)
            except Guard.CAUGHT as error:
                note(error, "pre-hook of a process group")

        return count_call


def _announced_bytes(op: Op, args: Any, size: int) -> int:
    """Returns the payload S: the unsharded bytes."""
    inputs, outputs = (sum(t.nbytes for t in ts) for ts in (args.input_tensors, args.output_tensors))
    if op in (Op.ALL_GATHER, Op.RECV):
        return int(outputs)
    return int(inputs * size if op is Op.GATHER else outputs * size if op is Op.SCATTER else inputs)


# ---- the collectives that a stalled rank waits in ------------------------------------------------

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
        # Collectives of a background thread go on while the training thread stands still
        of_training = {group.id: numbers[group.id] for group, _ in groups if not group.apart}
        self._quiet = 0 if of_training != self._last_numbers else self._quiet + 1
        self._last_numbers = of_training
        if self._quiet < self._quiet_limit() and not (is_first and self._attached):
            return self._end_stall()
        flying = self._in_flight(groups)
        self._write_progress(numbers)
        # At the first look after an attach, young collectives are ordinary and show no stall
        if is_first and not any(time.monotonic_ns() - e[1] > _LONG_NS for e in flying.values()):
            return False
        self._retire_flying(set(flying))
        self._write_flying(flying)
        return True

    def _end_stall(self) -> bool:
        """Takes back what was written of a stall that is over. Returns that the rank is not stalled."""
        self._stack_after = 0
        self._retire_flying(set())
        self._write_stack([])
        return False

    def _quiet_limit(self) -> int:
        """Returns how many checks without progress are a stall."""
        if self._attached:
            return _QUIET_ATTACHED
        checks = sorted(self._checks_of_steps)
        # The median: after an evaluation of ten minutes, the longest step hides a stall for half an hour
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
        # A copy: the training thread may register a group while the heartbeat iterates
        return list(self._collectives.groups.values())

    def _write_flying(self, flying: dict[tuple[int, int], Flying]) -> None:
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
            if numbers.get(group.id, -1) >= 0:
                head_word, seen_calls = pack_head(Kind.GROUP_SEQUENCE), group.issued + group.extra
                self._context.ring.write(
                    now_ns, head_word, pack_place(group.id), numbers[group.id], seen_calls, 0, 0
                )
        if self._attached or self._quiet >= self._stack_after:
            self._stack_after = self._quiet + min(self._quiet, _MAX_STACK_WAIT)
            self._write_stack(main_stack())

    def _write_stack(self, stack: list[str]) -> None:
        # The end of a stall is written beyond the limit, too: else its stack would be shown for ever
        if stack != self._stack and (not stack or self._stacks < _MAX_STACKS):
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
    # The Flight Recorder stamps CLOCK_REALTIME, while records have CLOCK_MONOTONIC
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
