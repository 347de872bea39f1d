"""Hooks on every collective that Python issues, at the pybind classes that each call passes.

``torch.distributed.ProcessGroup`` methods issue, ``Work.wait`` waits. Patching the classes catches every
caller, however early it imported a function: FSDP, DeepSpeed, the user's own code.

A record ISSUED is written before the call, so that a collective that hangs is visible from outside. A
record DONE is written when the collective was waited for. Collectives that C++ issues do not pass here;
see :mod:`zeromon_agents.observe.stall_detector`.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from zeromon.ring.buffer import NameKind
from zeromon.ring.codes import Flag, Kind, Op
from zeromon.ring.events import RECORD_SIZE, pack_dtype, pack_head
from zeromon_agents.hooks.process_groups import (
    DTYPES,
    PAYLOADS,
    Group,
    Payload,
    describe_group,
    first_tensor,
    sequence_number,
    text_of,
    total_bytes,
)
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.runtime.around import RAISED, Patches, around, leave_to_python
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import (
    END,
    EVENT,
    HELD_NS,
    IDLE,
    ISSUED_NS,
    NBYTES,
    OFF,
    ON,
    PLACE,
    WORD,
    Entry,
    HookContext,
    compiled_hooks,
)

if compiled_hooks is not None:
    compiled_hooks.settle_groups(Group)

MAX_OPEN_WORKS = 4096
BLOCKED_NS = 20_000
"""A wait that took longer has seen the end of the collective."""
# A name of the module costs a call less than one of the enclosing function, which each call copies.
_caller, _Tensor = threading.get_ident, torch.Tensor


def _entry_of_work(open_work: Any) -> Entry:
    """Returns an entry of :attr:`Collectives.open`; a tuple is a synchronous collective."""
    return [*open_work, 0, None, -1] if type(open_work) is tuple else open_work


class Collectives:
    """The hooks on ProcessGroup and Work, and what they keep between calls."""

    def __init__(self, context: HookContext, device: DeviceTimer) -> None:
        self._context = context
        self._device = device
        self.groups: dict[int, Group] = {}
        self.open: dict[int, Any] = {}
        """Works not yet waited for, by id, as a weak reference costs more: an entry, a list of those
        coalesced, or a tuple: of the first fields of a synchronous one, of none in a control step."""
        self._outlived: list[Entry] = []
        """Those whose work is gone and was not waited for, as a hook of DDP keeps its future only."""
        self._flushed: set[tuple[int, int]] = set()
        """PLACE and ISSUED_NS of those that had not ended at the last step's end."""
        self.counts: dict[tuple[int, int, int, int], list[int]] = {}
        """(group, op, phase, dtype and engine) -> [calls, bytes] of a control step."""
        self.warm = True
        self.attached = False
        """True if ranks began to count at different times. Then only a group's own sequence numbers,
        which are read at each call, are the same on all ranks."""
        self.completions = Completions()
        self.framework_label: Callable[[Any], str] = lambda _: ""
        """Returns the name that a framework gave to a group; "" without one."""
        self.last_counted: tuple[int, int, int, int] | None = None
        """(op, phase, group, bytes) of the newest collective of a control step."""

    # ---- groups -------------------------------------------------------------------------------

    def group_of(self, pg: Any, *, existed: bool = False) -> Group:
        """Returns the record of *pg*, registered at its first use.

        *existed*: the group is older than the agent.
        """
        registered = self.groups.get(id(pg))
        if registered is not None:
            return registered
        described = describe_group(pg, self.framework_label)
        number = self._context.ring.name(NameKind.GROUP, described)
        forget = self.groups.pop
        key = id(pg)
        group = Group(
            number,
            # Without the callback, a new group at the same address would be taken for this one
            weakref.ref(pg, lambda _: forget(key, None)),
            size=described["size"],
            # gloo blocks the host for device tensors, too, so the host's clock times it
            on_device=described["backend"] != "gloo" and any(d != "cpu" for d in described["devices"]),
            base=max(0, sequence_number(pg)) if existed else 0,
        )
        if not self.warm:
            group.seen_sequences = None
        self.groups[key] = group
        return group

    def register_groups(self, *, existed: bool = False) -> None:
        """Registers the groups that torch knows; *existed* as in :meth:`group_of`."""
        # A copy: a group that another thread makes meanwhile would raise RuntimeError here
        for pg in list(torch.distributed.distributed_c10d._world.pg_map):
            if text_of(pg, "group_name") is not None:
                self.group_of(pg, existed=existed)

    def is_apart(self, group: Group) -> bool:
        """Returns whether a thread of the program beside that of training calls *group*."""
        group.apart |= (called_apart := self._context.is_apart())
        return called_apart

    def end_warm_up(self) -> None:
        """Stops reading the group's sequence number at each collective."""
        self.warm = False
        for group in self.groups.values():
            group.seen_sequences = None

    # ---- hooks --------------------------------------------------------------------------------

    def install(self, patches: Patches, before_shutdown: Callable[[], None]) -> None:
        """Patches every communicating method that the classes have.

        *before_shutdown* is called before a group is destroyed, and its own count with it.
        """
        distributed = torch._C._distributed_c10d
        group_class, work_class = distributed.ProcessGroup, distributed.Work
        for name, payload in PAYLOADS.items():
            if name in vars(group_class):
                original = patches.find_original(group_class, name)
                patches.set(group_class, name, self._issue_hook(original, name, payload))
        if "_start_coalescing" in vars(group_class):
            start_name, end_name = "_start_coalescing", "_end_coalescing"
            begin_hook = around(self._context, after=self._coalescing_begins, where=start_name)
            end_hook = around(self._context, after=self._coalescing_ends, where=end_name)
            patches.wrap(group_class, start_name, begin_hook)
            patches.wrap(group_class, end_name, end_hook)
        if "shutdown" in vars(group_class):  # torch before 2.7 has none
            count = around(self._context, lambda *_: before_shutdown(), where="shutdown")
            patches.wrap(group_class, "shutdown", count)
        patches.wrap(work_class, "wait", self._wait_hook)

    def _issue_hook(self, original: Any, name: str, slot: Payload) -> Callable[..., Any]:  # noqa: C901
        """Returns the wrapper of one method.

        The function is long because its body is inlined: it runs at every collective, and each call
        inside costs about 50 ns.
        """
        context, groups, open_works = self._context, self.groups, self.open
        next_slot, pack, records, mask = context.ring.slots
        now_ns = time.monotonic_ns
        op, index, keyword, per_rank = slot
        issued = pack_head(Kind.ISSUED, op)
        op_word = pack_head(0, op)
        is_async = pack_head(0, flags=Flag.ASYNC)
        attached, timed = self.attached, self._device.device_type
        wants_callback = op not in (Op.SEND, Op.RECV, Op.BARRIER)
        point_to_point = op in (Op.SEND, Op.RECV)
        # Sends and receives have no options that say it, and always return before they have ended
        unless_told: bool | None = point_to_point or None
        # torch 2.6 does not say which calls are asynchronous: each one may then get a callback
        asks = not point_to_point and hasattr(torch.distributed.AllreduceOptions, "asyncOp")

        settled_group: Group | None = None  # that of the newest call, where a call takes one number

        def issue_with_hook(pg: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: C901
            nonlocal settled_group
            mode = context.mode
            if not mode:  # an empty ** costs a copy, and * a list: both are left out where they can be
                if len(args) == 2 and not kwargs:
                    return original(pg, args[0], args[1])
                return original(pg, *args, **kwargs)
            entry: Any = None
            sequence_before, called_async, is_timed = -1, unless_told, False
            try:
                group = groups.get(id(pg)) or self.group_of(pg)
                if index < 0:  # the options of a barrier name its device
                    payload, nbytes, dtype = args[-1] if args else kwargs.get("opts"), 0, 0
                    payload = payload if getattr(payload, "device", None) else None
                else:
                    try:
                        payload = args[index]
                    except IndexError:  # overloads for one tensor name it differently, and first
                        payload = kwargs[keyword if keyword in kwargs else next(iter(kwargs))]
                    if type(payload) is list and len(payload) == 1:
                        payload = payload[0]
                    if type(payload) is _Tensor:
                        nbytes, dtype = payload.nbytes, DTYPES[payload.dtype]
                    else:
                        nbytes = total_bytes(payload)
                        payload = first_tensor(payload)
                        dtype = DTYPES.get(getattr(payload, "dtype", None), 0)
                    if per_rank:
                        nbytes *= group.size
                group.issued += 1
                if point_to_point:
                    group.point_to_point += 1
                    sequence = -group.point_to_point
                elif attached:
                    sequence = sequence_number(pg) + 1
                    # The group's own number stands still until the coalescing ends
                    if group.coalescing is not None:
                        sequence += len(group.coalescing)
                    group.numbers.append(sequence)
                else:
                    sequence = group.issued - group.point_to_point
                head_word, at, engine = context.head_word, group.id | context.unit, context.engine
                # The comparison spares the training thread a call at each collective
                caller = _caller()
                is_known = caller in (context.thread, context.backward_thread)
                if not is_known and self.is_apart(group):
                    # It is not of the phase, unit and engine of training, and may span steps.
                    # Control steps time it, too. On a device it is counted: the timer knows one stream.
                    head_word, at, engine = 0, context.place_apart(group.id), 0
                    mode = IDLE if group.on_device else ON
                if group.on_device:
                    # A group of `cpu:gloo,cuda:nccl` also sends tensors of the host, which have no event
                    is_timed = payload is not None and payload.device.type == timed
                    if is_timed and self._device.captures():
                        mode = OFF  # nothing runs, so nothing would end the record
                if mode == ON:
                    if asks:
                        try:
                            called_async = (args or (payload,))[-1].asyncOp
                        except (AttributeError, IndexError):  # an overload without options
                            called_async = None
                    if called_async:
                        head_word |= is_async
                    started, n = now_ns(), next_slot()
                    # fmt: off
                    pack(records, (n & mask) * RECORD_SIZE, n, started, issued | head_word, at,
                         nbytes, sequence, dtype, engine, n)
                    # fmt: on
                    if called_async is False:  # no callback fills in its end: a tuple costs less
                        entry = op_word | head_word, at, nbytes, started, sequence
                    else:
                        entry = [op_word | head_word, at, nbytes, started, sequence, 0, None, 0]
                    if is_timed:
                        entry = _entry_of_work(entry)
                        self._device.issued(entry)
                elif mode:
                    self.count(group.id, op, nbytes, dtype)
                if group is settled_group:
                    pass
                elif name in group.even:
                    settled_group = group
                else:
                    extra = group.extras.get(name)
                    if extra is None:
                        sequence_before = sequence_number(pg)
                    elif extra and group.coalescing is None:
                        group.extra += extra
            except Guard.CAUGHT as error:
                context.guard.note(error, name)
                # The call comes after this block, within which its own error would carry this one
                entry = None
            try:
                if kwargs:
                    work = original(pg, *args, **kwargs)
                else:  # payload and options: without the list that * builds
                    work = original(pg, args[0], args[1]) if len(args) == 2 else original(pg, *args)
            except BaseException:
                with suppress(Guard.CAUGHT):  # the caller must get the call's own error
                    if entry is not None:
                        self._ended_at_once(entry, has_failed=True)
                raise
            try:
                if sequence_before >= 0:
                    self.note_sequence(group, pg, sequence_before, name)
                if entry is None:
                    # A deleted work with a record may have this address: this wait must not end it
                    if id(work) in open_works:
                        self.keep_outlived(open_works.pop(id(work)))
                    if context.mode == mode == IDLE and is_timed and work is not None:
                        open_works[id(work)] = ()  # a step that is timed may wait for it
                else:
                    if is_timed and index >= 0:  # the call of a barrier waits for its end
                        entry[HELD_NS] = now_ns() - started
                    if group.coalescing is not None:
                        group.coalescing.append(_entry_of_work(entry))
                    elif work is None:
                        self._ended_at_once(entry, has_failed=False)
                    else:
                        if open_works.setdefault(id(work), entry) is not entry:
                            self.keep_outlived(open_works[id(work)])
                            open_works[id(work)] = entry
                        if called_async is not False and entry[EVENT] is None:
                            entry[HELD_NS] = now_ns() - entry[ISSUED_NS]
                            # on a device a callback would wait in a stream of its own
                            on_device = not getattr(payload, "is_cpu", True)
                            if wants_callback and not on_device:
                                self.completions.call_back(work, entry)
            except Guard.CAUGHT as error:
                context.guard.note(error, name)
            return work

        issue_with_hook.__name__ = name
        # pybind recognizes by the code's name that a Python subclass calls its base class
        issue_with_hook.__code__ = issue_with_hook.__code__.replace(co_name=name)
        slow = leave_to_python(issue_with_hook, and_callees=True)
        if context.recorder is None or attached or point_to_point or index < 0:
            return slow
        objects = (
            groups, open_works, name, DTYPES, _Tensor, timed, self._device.captures, self._device.issued,
            self._ended_at_once, self.keep_outlived, self.completions.call_back, context.guard.note,
            lambda group, nbytes, dtype: self.count(group, op, nbytes, dtype),
        )  # fmt: skip
        flags = per_rank | asks << 1 | wants_callback << 2
        codes = index, issued, op_word, is_async, flags
        hook: Callable[..., Any] = compiled_hooks.Issue(
            context, original, slow, context.recorder, *objects, *codes
        )
        return functools.update_wrapper(hook, slow)

    def _wait_hook(self, original: Any) -> Callable[..., Any]:
        context, pop_entry, now_ns = self._context, self.open.pop, time.monotonic_ns
        next_slot, pack, records, mask = context.ring.slots
        waited_for_kinds = self.completions.waited_for
        waited_for, is_known = waited_for_kinds.add, pack_head(0, flags=Flag.SPAN_KNOWN)
        done = pack_head(Kind.DONE) | is_known
        failed = done | pack_head(0, flags=Flag.FAILED)

        def wait_with_hook(work: Any, *args: Any, **kwargs: Any) -> Any:
            entry: Any = pop_entry(id(work), None) if context.mode else None
            if not entry:
                # () is a work of a control step: where this step waits for it, the wait is exposed time
                if entry is not None and context.mode == ON:
                    return self.wait_for_entries(original, work, [], args, kwargs)
                return original(work, *args, **kwargs) if args or kwargs else original(work)
            outcome, reached = failed, 0
            if type(entry) is tuple:
                head_word, at, nbytes, issued, sequence = entry
            elif type(entry[0]) is list or entry[EVENT] is not None:
                entries = entry if type(entry[0]) is list else [entry]
                return self.wait_for_entries(original, work, entries, args, kwargs)
            else:
                head_word, at, nbytes, issued, sequence, _, _, held_ns = entry
                reached = now_ns()
            try:
                result = original(work, *args, **kwargs) if args or kwargs else original(work)
                outcome = done
                return result
            finally:
                left_ns = now_ns()
                try:
                    if not reached:  # synchronous: it has blocked since it was issued
                        blocked = left_ns - issued
                    else:
                        end_ns = entry[END]
                        if end_ns and end_ns < left_ns:  # a callback saw the completion
                            left_ns = end_ns
                        # Neither a callback nor the wait saw the end: this moment is an upper bound
                        elif not end_ns and left_ns - reached < BLOCKED_NS:
                            outcome ^= is_known
                        # Else `call_back` takes this one for unfinished while its callback is on the way
                        entry[END] = left_ns
                        blocked = held_ns + (left_ns - reached if left_ns > reached else 0)
                        waited_for((head_word, at))
                    n = next_slot()
                    # fmt: off
                    pack(records, (n & mask) * RECORD_SIZE, n, left_ns, head_word | outcome, at,
                         nbytes, issued, blocked, sequence, n)
                    # fmt: on
                except Guard.CAUGHT as error:
                    context.guard.note(error, "Work.wait")

        slow = leave_to_python(wait_with_hook, and_callees=True)
        if context.recorder is None:
            return slow
        objects, codes = (self.open, waited_for_kinds), (done, failed, int(is_known), BLOCKED_NS)
        hook: Callable[..., Any] = compiled_hooks.Wait(
            context, original, slow, context.recorder, *objects, *codes
        )
        return functools.update_wrapper(hook, slow)

    def _ended_at_once(self, open_work: Any, has_failed: bool) -> None:
        """Writes the end of a collective whose call raised, or returned no work."""
        entry, now_ns = _entry_of_work(open_work), time.monotonic_ns()
        if has_failed:
            entry[WORD] |= pack_head(0, flags=Flag.FAILED)
            self.done(entry, now_ns, 0)
        elif entry[EVENT] is not None:
            self._device.ran_here(entry)
        else:
            self.done(entry, now_ns, now_ns - entry[ISSUED_NS])

    def wait_for_entries(
        self, original: Any, work: Any, entries: list[Entry], args: Any, kwargs: Any
    ) -> Any:
        """Waits for device work: several if coalesced, no *entries* if a control step issued it."""
        guard, timed = self._context.guard, None
        reached = time.monotonic_ns()
        try:
            timed = self._device.reached_wait(entries)
        except Guard.CAUGHT as error:
            guard.note(error, "Work.wait")
        try:
            return original(work, *args, **kwargs)
        finally:
            try:
                if timed is not None:
                    self._device.left_wait(timed)
                else:
                    left_ns = time.monotonic_ns()
                    for position, entry in enumerate(entries):
                        # One wait covers all coalesced entries: it counts as exposed for the first alone
                        is_seen = entry[HELD_NS] < 0 or left_ns - reached >= BLOCKED_NS
                        blocked_ns = left_ns - (entry[ISSUED_NS] if entry[HELD_NS] < 0 else reached)
                        self.done(entry, left_ns, 0 if position else blocked_ns, is_seen)
            except Guard.CAUGHT as error:
                guard.note(error, "Work.wait")

    def _coalescing_begins(self, _: None, result: Any, pg: Any, *__: Any) -> None:
        if result is not RAISED:  # as that of gloo, which coalesces nothing
            group = self.group_of(pg)
            group.coalescing, group.coalesced_from = [], sequence_number(pg) - group.issued

    def _coalescing_ends(self, _: None, work: Any, pg: Any, *__: Any) -> None:
        group = self.group_of(pg)
        entries, group.coalescing = group.coalescing, None
        if entries is None:  # the coalescing began before the agent was attached
            return
        group.extra += sequence_number(pg) - group.issued - group.coalesced_from
        if work is RAISED:
            for entry in entries:
                entry[WORD] |= pack_head(0, flags=Flag.FAILED)
                self.done(entry, time.monotonic_ns(), 0)
            return
        for entry in entries:  # they are launched here
            if entry[EVENT] is not None:
                entry[HELD_NS] = time.monotonic_ns() - entry[ISSUED_NS]
        if work is not None and (entries or (group.on_device and self._context.mode == IDLE)):
            self.open[id(work)] = entries or ()

    def broadcasts_begin(self, pg: Any, *_: Any, **__: Any) -> tuple[Group, int, int]:
        """Runs before a call that broadcasts tensors in C++, one dtype or bucket after the other."""
        group = self.group_of(pg)
        group.matched = -1
        return group, sequence_number(pg), time.monotonic_ns()

    def broadcasts_end(
        self, state: tuple[Group, int, int] | None, _: Any, pg: Any, tensors: Any, *__: Any
    ) -> None:
        """Records those broadcasts; the call returns when they have ended."""
        if state is None:
            return
        group, sequence_before, began_ns = state
        calls, context = sequence_number(pg) - sequence_before, self._context
        end_ns, nbytes = time.monotonic_ns(), total_bytes(tensors) // max(1, calls)
        if group.seen_sequences is not None:
            # Else their entries in the Flight Recorder would count as collectives that no hook saw
            group.seen_sequences.update(range(sequence_before + 1, sequence_before + calls + 1))
        for number in range(calls):
            group.issued += 1
            sequence = group.issued - group.point_to_point
            if self.attached:
                sequence = sequence_before + number + 1
                group.numbers.append(sequence)
            if context.mode != ON:
                self.count(group.id, Op.BROADCAST, nbytes, 0)
                continue
            head_word, at = context.head_word, group.id | context.unit
            start = began_ns + (end_ns - began_ns) * number // calls
            took = (end_ns - began_ns) // calls
            issued = pack_head(Kind.ISSUED, Op.BROADCAST) | head_word
            context.ring.write(start, issued, at, nbytes, sequence, 0, context.engine)
            entry = [pack_head(0, Op.BROADCAST) | head_word, at, nbytes, start, sequence, 0, None, 0]
            # on a device the host waits for nothing: the time is that of the calls
            self.done(entry, start + took, 0 if group.on_device else took, not group.on_device)
        group.matched = group.issued

    # ---- helpers ------------------------------------------------------------------------------

    def count(self, group: int, op: int, nbytes: int, dtype: int) -> None:
        """Counts a collective of a control step."""
        phase = self._context.phase
        self.last_counted = (op, phase, group, nbytes)
        key = (group, op, phase, pack_dtype(dtype, self._context.engine))
        row = self.counts.get(key)
        if row is None:
            self.counts[key] = [1, nbytes]
        else:
            row[0] += 1
            row[1] += nbytes

    def done(self, entry: Entry, end_ns: int, blocked_ns: int, span_known: bool = True) -> None:
        """Writes the end of *entry*."""
        head_word, at, nbytes, issued, sequence, _, _, _ = entry
        entry[END] = end_ns
        done = pack_head(Kind.DONE, flags=Flag.SPAN_KNOWN if span_known else 0) | head_word
        self._context.ring.write(end_ns, done, at, nbytes, issued, blocked_ns, sequence)

    def number_next(self, group: Group) -> int:
        """Counts the call of *group* that is about to be issued; returns its number."""
        group.issued, sequence = group.issued + 1, sequence_number(group.ref()) + 1
        if group.seen_sequences is not None:
            group.seen_sequences.add(sequence)
        if not self.attached:
            return group.issued - group.point_to_point
        group.numbers.append(sequence)
        return sequence

    def note_sequence(self, group: Group, pg: Any, sequence_before: int, name: str) -> None:
        """Notes the sequence numbers that a call took, and how many one call of its method takes.

        Some methods take none (point-to-point on NCCL) or two (a list reduce-scatter on gloo).
        Coalesced calls are measured together, at the end of the coalescing.
        """
        sequence_after = sequence_number(pg)
        if group.coalescing is None:
            group.extra += sequence_after - sequence_before - 1
        if group.seen_sequences is not None:  # the warm-up looks at each call
            group.seen_sequences.update(range(sequence_before + 1, sequence_after + 1))
        elif group.coalescing is None:
            group.extras[name] = extra = sequence_after - sequence_before - 1
            if not extra:
                group.even.add(name)

    def flush_step(self) -> None:
        """Writes, at the end of a step, the counts of a control step and the works never waited for."""
        now_ns = time.monotonic_ns()
        for (group, op, phase, kind), (count, nbytes) in self.counts.items():
            # fmt: off
            self._context.write(now_ns, Kind.COUNTED, op, phase, 0, group, 0, count, nbytes, 1, kind)
            # fmt: on
        self.counts.clear()
        self.last_counted = None
        if self.open or self._outlived:
            self._flush_unwaited()

    def keep_outlived(self, entry: Any) -> None:
        """Keeps *entry*, whose work is gone, as the id of that work is another's now."""
        is_one = type(entry) is list and type(entry[0]) is not list
        if is_one and entry[EVENT] is None and len(self._outlived) < MAX_OPEN_WORKS:
            self._outlived.append(entry)

    def _flush_unwaited(self) -> None:
        waiting = [entry for entry in self._outlived if not self._flush(entry)]
        # what had not ended in the step before, either, is not called back
        self._outlived = [e for e in waiting if (e[PLACE], e[ISSUED_NS]) not in self._flushed]
        self._flushed = {(e[PLACE], e[ISSUED_NS]) for e in waiting}
        for key, entry in list(self.open.items()):
            # A synchronous or coalesced work gets no callback, so its end is known at its wait alone
            if type(entry) is not list or type(entry[0]) is list:
                continue
            if self._flush(entry):
                self.open.pop(key, None)
            else:
                # Its kind is dropped unwaited: without a callback the next ones would have no end
                self.completions.waited_for.discard((entry[WORD], entry[PLACE]))
        # Synchronous works that a script drops unwaited stay here: without the bound, a leak
        while len(self.open) > MAX_OPEN_WORKS:
            self.open.pop(next(iter(self.open)))

    def _flush(self, entry: Entry) -> bool:
        """Writes the end of *entry*, which nobody waited for; False where it has not ended."""
        if entry[END]:
            self.done(entry, entry[END], max(0, entry[HELD_NS]))
        return bool(entry[END])


# ---- when asynchronous collectives of a CPU have ended ------------------------------------------

_EXIT_TIMEOUT_NS = 200_000_000
_SMALL_BYTES = 64 << 10
"""Up to this size the end of a collective is not worth a callback while another one is to come."""


class Completions:
    """The callbacks, and which collectives need none."""

    def __init__(self) -> None:
        self._last: Entry | None = None
        """The entry of the newest callback."""
        self._last_completed: Entry | None = None
        self.waited_for: set[tuple[int, int]] = set()
        """WORD and PLACE of collectives whose works are waited for, not only their futures."""

    def call_back(self, work: Any, entry: Entry) -> None:
        """Gets the true completion time of an asynchronous collective from the backend's own thread.

        That thread has to get the interpreter's lock, which is what it costs. So of many small ones that
        are issued at once few are called back, if their kind is waited for. For the others the time at
        which they are waited for is an upper bound of their end.
        """
        last_entry, kind = self._last, (entry[WORD], entry[PLACE])
        is_small = entry[NBYTES] <= _SMALL_BYTES
        if is_small and last_entry is not None and not last_entry[END] and kind in self.waited_for:
            return

        def note_completion(_: Any) -> None:
            # The thread that waits may have been faster, and its record has that end
            if not entry[END]:
                entry[END] = time.monotonic_ns()
            self._last_completed = entry

        try:
            future = work.get_future()
        except RuntimeError:  # of torch 2.6 a reduce-scatter on gloo: it ends when it is waited for
            return
        self._last = entry
        future.add_done_callback(note_completion)

    def settle(self, timeout_ns: int = _EXIT_TIMEOUT_NS) -> None:
        """Waits, before the interpreter exits, until the backend's thread has run the newest callback.

        A thread that requests the interpreter's lock after the exit is ended in the middle of C++, which
        aborts the process.
        """
        entry = self._last
        if entry is None:
            return
        deadline = time.monotonic_ns() + timeout_ns
        while self._last_completed is not entry and time.monotonic_ns() < deadline:
            time.sleep(0.001)
        time.sleep(0.002)  # the callback has run; its thread still releases it
