"""Every collective that Python issues, seen at the pybind classes it must pass.

``torch.distributed.ProcessGroup`` methods issue, ``Work.wait`` waits. Patching the classes sees every
caller, however early it imported a function: FSDP, DeepSpeed, the user's own code.

A record ISSUED is written before the call (so that a collective that hangs is visible from outside),
a record DONE when it was waited for. What C++ issues does not pass here; see :mod:`.unseen`.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from zeromon.events import Dtype, Flag, Kind, Op, head, typed
from zeromon.ring import NameKind
from zeromon_agents.guard import Guard
from zeromon_agents.patches import Patches
from zeromon_agents.pending import DeviceTimer
from zeromon_agents.recorder import (
    END,
    EVENT,
    HELD_NS,
    ISSUED_NS,
    ON,
    WORD,
    Entry,
    Recorder,
)

_EXIT_PATIENCE_NS = 200_000_000


class Payload(NamedTuple):
    """Where a method's payload S is: the argument's index and name, and whether S is n times it."""

    op: Op
    position: int
    keyword: str
    per_rank: bool = False


_AG, _RS, _A2A = Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL

PAYLOADS: dict[str, Payload] = {
    "allreduce": Payload(Op.ALL_REDUCE, 0, "tensors"),
    "allreduce_coalesced": Payload(Op.ALL_REDUCE, 0, "tensors"),
    "broadcast": Payload(Op.BROADCAST, 0, "tensors"),
    "reduce": Payload(Op.REDUCE, 0, "tensors"),
    "allgather": Payload(_AG, 0, "output_tensors"),
    "allgather_coalesced": Payload(_AG, 0, "output_lists"),
    "all_gather_single": Payload(_AG, 0, "output"),
    "_allgather_base": Payload(_AG, 0, "output"),
    "all_gather_single_coalesced": Payload(_AG, 0, "outputs"),
    "allgather_into_tensor_coalesced": Payload(_AG, 0, "outputs"),
    "gather": Payload(Op.GATHER, 1, "input_tensors", per_rank=True),
    "scatter": Payload(Op.SCATTER, 0, "output_tensors", per_rank=True),
    "reduce_scatter": Payload(_RS, 1, "input_tensors"),
    "reduce_scatter_single": Payload(_RS, 1, "inputTensor"),
    "_reduce_scatter_base": Payload(_RS, 1, "inputTensor"),
    "reduce_scatter_single_coalesced": Payload(_RS, 1, "inputs"),
    "reduce_scatter_tensor_coalesced": Payload(_RS, 1, "inputs"),
    "all_to_all_single": Payload(_A2A, 1, "input"),
    "alltoall_base": Payload(_A2A, 1, "input"),
    "alltoall": Payload(_A2A, 1, "input_tensors"),
    "send": Payload(Op.SEND, 0, "tensors"),
    "recv": Payload(Op.RECV, 0, "tensors"),
    "recv_anysource": Payload(Op.RECV, 0, "tensors"),
    "barrier": Payload(Op.BARRIER, -1, ""),
    "monitored_barrier": Payload(Op.BARRIER, -1, ""),
}
"""The methods that communicate, in every spelling that a supported torch has."""

IGNORED = frozenset(
    "rank size name get_group_store split_group merge_remote_group abort shutdown _id _backend_id"
    " _set_sequence_number_for_group _get_sequence_number_for_group set_timeout _device_types"
    " _get_backend_name _start_coalescing _end_coalescing _register_backend _get_backend"
    " _set_default_backend _register_on_completion_hook _wait_for_pending_works _has_hooks"
    " _enable_collectives_timing _set_group_name group_name _set_group_desc group_desc"
    " bound_device_id use_pg_for_symm_mem_rendezvous boxed unbox _pybind11_conduit_v1_"
    " BackendType UNDEFINED GLOO NCCL XCCL UCC MPI CUSTOM"
    # of older versions
    " _set_backend _get_backends _supports_splitting _is_ucc_available eager_connect_single_device"
    " perform_nocolor_split comm_split_count _set_timeout get_timeout".split()
)
"""What else the class has: nothing here communicates by itself."""

_DTYPES = {
    getattr(torch, name): code
    for name, code in (
        ("float32", Dtype.FLOAT32),
        ("float16", Dtype.FLOAT16),
        ("bfloat16", Dtype.BFLOAT16),
        ("float64", Dtype.FLOAT64),
        ("int8", Dtype.INT8),
        ("uint8", Dtype.UINT8),
        ("int16", Dtype.INT16),
        ("int32", Dtype.INT32),
        ("int64", Dtype.INT64),
        ("bool", Dtype.BOOL),
        ("float8_e4m3fn", Dtype.FLOAT8_E4M3FN),
        ("float8_e5m2", Dtype.FLOAT8_E5M2),
    )
    if hasattr(torch, name)
}


class Group:
    """What is known of a process group, without keeping it alive."""

    __slots__ = (
        "base",
        "coalesced_from",
        "coalescing",
        "cuda",
        "explained",
        "extra",
        "extras",
        "id",
        "issued",
        "numbers",
        "point_to_point",
        "ref",
        "seen_sequences",
        "size",
    )

    def __init__(self, number: int, ref: Any, *, size: int, cuda: bool, base: int) -> None:
        self.id = number
        self.ref = ref
        self.size = size
        self.cuda = cuda
        self.base = base
        """The group's own sequence number when we began to watch."""
        self.issued = 0
        """Calls that passed our hooks."""
        self.point_to_point = 0
        """Sends and receives among them: they are numbered apart, for only two ranks call each."""
        self.extra = 0
        """By how much their sequence numbers exceed one each."""
        self.extras: dict[str, int] = {}
        """By method: how many sequence numbers a call takes beyond one; measured at its first use."""
        self.coalesced_from = 0
        """Sequence number minus calls when coalescing began."""
        self.explained = 0
        """Sequence numbers of C++ collectives already reported."""
        self.coalescing: list[Entry] | None = None
        self.numbers: deque[int] = deque(maxlen=64)
        """In a run that was joined: the numbers of the newest collectives that passed our hooks."""
        self.seen_sequences: set[int] | None = set()
        """During warm-up: the sequence numbers that are ours."""


def total_bytes(payload: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(payload, torch.Tensor):
        return int(payload.nbytes)
    return sum(total_bytes(item) for item in payload)


def _first_tensor(payload: Any) -> Any:
    while isinstance(payload, (list, tuple)) and payload:
        payload = payload[0]
    return payload


class Collectives:
    """Installs and keeps the hooks on ProcessGroup and Work."""

    def __init__(self, recorder: Recorder, device: DeviceTimer) -> None:
        self._recorder = recorder
        self._device = device
        self.groups: dict[int, Group] = {}
        self.open: dict[int, Any] = {}
        """Works not yet waited for, by id: a weak reference a call would cost more."""
        self.counts: dict[tuple[int, int, int, int], list[int]] = {}
        """(group, op, phase, dtype and engine) -> [calls, bytes] of a step with idle hooks."""
        self.warm = True
        self.joined = False
        """Whether ranks began to count at different moments, so that only a group's own numbers,
        which are read at each call, are the same on all."""
        self._last_called_back: Entry | None = None
        self._last_completed: Entry | None = None
        self.framework_label: Callable[[Any], str] = lambda _: ""
        """The name that a framework (DeepSpeed) gave a group, or ""."""
        self.last_counted: tuple[int, int, int, int] | None = None
        """(op, phase, group, bytes) of the newest collective of a step with idle hooks."""

    # ---- groups -------------------------------------------------------------------------------

    def group_of(self, pg: Any, *, existed: bool = False) -> Group:
        """The record of *pg*, made at first sight. *existed*: it is older than the agent."""
        known = self.groups.get(id(pg))
        if known is not None:
            return known
        facts = describe_group(pg, self.framework_label)
        number = self._recorder.ring.name(NameKind.GROUP, facts)
        forget = self.groups.pop
        key = id(pg)
        group = Group(
            number,
            weakref.ref(pg, lambda _: forget(key, None)),
            size=facts["size"],
            # gloo blocks the host also for device tensors, so the host's clock is right for it
            cuda=facts["backend"] != "gloo" and any(d != "cpu" for d in facts["devices"]),
            base=sequence_number(pg) if existed else 0,
        )
        if not self.warm:
            group.seen_sequences = None
        self.groups[key] = group
        return group

    def end_warm_up(self) -> None:
        """From now on no sequence number is read per collective."""
        self.warm = False
        for group in self.groups.values():
            group.seen_sequences = None

    # ---- hooks --------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Patches every communicating method that the classes have."""
        distributed = torch._C._distributed_c10d
        group_class, work_class = distributed.ProcessGroup, distributed.Work
        for name, payload in PAYLOADS.items():
            if name in vars(group_class):
                original = patches.original(group_class, name)
                patches.set(group_class, name, self._issue_hook(original, name, payload))
        if "_start_coalescing" in vars(group_class):
            start = patches.original(group_class, "_start_coalescing")
            end = patches.original(group_class, "_end_coalescing")
            patches.set(group_class, "_start_coalescing", self._start_coalescing_hook(start))
            patches.set(group_class, "_end_coalescing", self._end_coalescing_hook(end))
        patches.set(work_class, "wait", self._wait_hook(patches.original(work_class, "wait")))

    def _issue_hook(self, original: Any, name: str, where: Payload) -> Callable[..., Any]:
        """The wrapper of one method. Long because it is inlined: each call in here costs 50 ns."""
        recorder, groups, opened = self._recorder, self.groups, self.open
        write, note, now = recorder.ring.write, recorder.guard.note, time.monotonic_ns
        op, index, keyword, per_rank = where
        issued = head(Kind.ISSUED, op)
        tensor_type, dtypes = torch.Tensor, _DTYPES
        op_word, failed = head(0, op), head(0, flags=Flag.FAILED)
        is_async = head(0, flags=Flag.ASYNC)
        joined = self.joined
        wants_callback = op not in (Op.SEND, Op.RECV, Op.BARRIER)
        point_to_point = op in (Op.SEND, Op.RECV)

        def method(pg: Any, *args: Any, **kwargs: Any) -> Any:
            mode = recorder.mode
            if not mode:  # an empty ** costs a copy, so it is left out where it can be
                return original(pg, *args, **kwargs) if kwargs else original(pg, *args)
            entry: Entry | None = None
            before, called_async = -1, None
            try:
                group = groups.get(id(pg)) or self.group_of(pg)
                if index < 0:
                    payload, nbytes, dtype = None, 0, 0
                else:
                    if index < len(args):
                        payload = args[index]
                    else:  # overloads for one tensor name it differently: then it comes first
                        payload = kwargs[keyword if keyword in kwargs else next(iter(kwargs))]
                    if type(payload) is list and len(payload) == 1:
                        payload = payload[0]
                    if type(payload) is tensor_type:
                        nbytes, dtype = payload.nbytes, dtypes.get(payload.dtype, 0)
                    else:
                        nbytes = total_bytes(payload)
                        payload = _first_tensor(payload)
                        dtype = dtypes.get(getattr(payload, "dtype", None), 0)
                    if per_rank:
                        nbytes *= group.size
                group.issued += 1
                if point_to_point:
                    group.point_to_point += 1
                    sequence = -group.point_to_point
                elif joined:
                    sequence = sequence_number(pg) + 1
                    if group.coalescing is not None:
                        sequence += len(group.coalescing)
                    group.numbers.append(sequence)
                else:
                    sequence = group.issued - group.point_to_point
                if mode == ON:
                    # None: point-to-point, or a torch that does not say
                    called_async = getattr(args[-1] if args else None, "asyncOp", None)
                    word = recorder.context | is_async if called_async else recorder.context
                    at, started = group.id | recorder.unit << 16, now()
                    write(started, issued | word, at, nbytes, sequence, dtype, recorder.engine)
                    held = -1 if called_async is False else 0
                    entry = [op_word | word, at, nbytes, started, sequence, 0, None, held]
                    if group.cuda and payload is not None and payload.is_cuda:
                        self._device.issued(entry)
                else:
                    self._count(group.id, op, nbytes, dtype)
                extra = group.extras.get(name)
                if extra is None or group.seen_sequences is not None:
                    before = sequence_number(pg)
                elif extra and group.coalescing is None:
                    group.extra += extra
            except Guard.CAUGHT as error:
                note(error, name)
                return original(pg, *args, **kwargs)
            try:
                work = original(pg, *args, **kwargs) if kwargs else original(pg, *args)
            except BaseException:
                with suppress(Guard.CAUGHT):  # what the caller must see is the call's own error
                    if entry is not None:
                        entry[WORD] |= failed
                        self._done(entry, now(), 0)
                raise
            try:
                if before >= 0:
                    self._note_sequence(group, pg, before, name)
                if entry is None:
                    opened.pop(id(work), None)  # an id may be used again: no older entry for it
                else:
                    if group.coalescing is not None:
                        group.coalescing.append(entry)
                    elif work is None:
                        if entry[EVENT] is not None:
                            self._device.ran_here(entry)
                        else:
                            self._done(entry, now(), now() - entry[ISSUED_NS])
                    else:
                        opened[id(work)] = entry
                        if called_async is not False and entry[EVENT] is None:
                            entry[HELD_NS] = now() - entry[ISSUED_NS]
                            # on a device a callback would wait in a stream of its own
                            on_device = getattr(payload, "is_cuda", False)
                            if called_async and wants_callback and not on_device:
                                self._call_back(work, entry)
            except Guard.CAUGHT as error:
                note(error, name)
            return work

        method.__name__ = name
        # pybind tells by the code's name that a Python subclass calls its base class, not itself
        method.__code__ = method.__code__.replace(co_name=name)
        return method

    def _wait_hook(self, original: Any) -> Callable[..., Any]:
        recorder, take, now = self._recorder, self.open.pop, time.monotonic_ns
        note, write = recorder.guard.note, recorder.ring.write
        done, failed = head(Kind.DONE, flags=Flag.END_KNOWN), head(0, flags=Flag.FAILED)

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            entry = take(id(work), None) if recorder.mode else None
            if entry is None:
                return original(work, *args, **kwargs) if args or kwargs else original(work)
            if type(entry[0]) is list or entry[EVENT] is not None:
                return self._wait_long_way(original, work, entry, args, kwargs)
            reached, outcome = now(), failed
            try:
                result = original(work, *args, **kwargs) if args or kwargs else original(work)
                outcome = 0
                return result
            finally:
                left = now()
                try:
                    word, at, nbytes, issued, sequence, end, _, held = entry
                    if end and end < left:  # a callback saw the completion
                        left = end
                    entry[END] = left
                    if held < 0:
                        blocked = left - issued
                    else:
                        blocked = (left - reached if left > reached else 0) + held
                    write(left, done | word | outcome, at, nbytes, issued, blocked, sequence)
                except Guard.CAUGHT as error:
                    note(error, "Work.wait")

        return wait

    def _wait_long_way(self, original: Any, work: Any, entry: Any, args: Any, kwargs: Any) -> Any:
        """A wait for device work, or for several coalesced collectives at once."""
        entries: list[Entry] = entry if type(entry[0]) is list else [entry]
        guard, timed = self._recorder.guard, None
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
                    left = time.monotonic_ns()
                    for position, one in enumerate(entries):
                        held = left - one[ISSUED_NS] if one[HELD_NS] < 0 else left - reached
                        self._done(one, left, 0 if position else held)
            except Guard.CAUGHT as error:
                guard.note(error, "Work.wait")

    def _start_coalescing_hook(self, original: Any) -> Callable[..., Any]:
        recorder = self._recorder

        def _start_coalescing(pg: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.mode:
                try:
                    group = self.group_of(pg)
                    group.coalescing, group.coalesced_from = [], sequence_number(pg) - group.issued
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "_start_coalescing")
            return original(pg, *args, **kwargs)

        return _start_coalescing

    def _end_coalescing_hook(self, original: Any) -> Callable[..., Any]:
        recorder = self._recorder

        def _end_coalescing(pg: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(pg, *args, **kwargs)
            if recorder.mode:
                try:
                    group = self.group_of(pg)
                    entries, group.coalescing = group.coalescing, None
                    if entries is None:  # it began before we came
                        return work
                    group.extra += sequence_number(pg) - group.issued - group.coalesced_from
                    if entries and work is not None:
                        self.open[id(work)] = entries
                except Guard.CAUGHT as error:
                    recorder.guard.note(error, "_end_coalescing")
            return work

        return _end_coalescing

    # ---- helpers ------------------------------------------------------------------------------

    def _count(self, group: int, op: int, nbytes: int, dtype: int) -> None:
        phase = self._recorder.phase
        self.last_counted = (op, phase, group, nbytes)
        key = (group, op, phase, typed(dtype, self._recorder.engine))
        row = self.counts.get(key)
        if row is None:
            self.counts[key] = [1, nbytes]
        else:
            row[0] += 1
            row[1] += nbytes

    def _call_back(self, work: Any, entry: Entry) -> None:
        """Learns the true completion of an asynchronous collective from the backend's own thread."""

        def completed(_: Any) -> None:
            if not entry[END]:
                entry[END] = time.monotonic_ns()
            self._last_completed = entry

        self._last_called_back = entry
        work.get_future().add_done_callback(completed)

    def settle(self, patience_ns: int = _EXIT_PATIENCE_NS) -> None:
        """Before the interpreter goes: lets the backend's thread finish with our newest callback.

        A thread that asks for the interpreter's lock after that is ended in the middle of C++, which
        aborts the process.
        """
        entry = self._last_called_back
        if entry is None:
            return
        deadline = time.monotonic_ns() + patience_ns
        while self._last_completed is not entry and time.monotonic_ns() < deadline:
            time.sleep(0.001)
        time.sleep(0.002)  # the callback has run; its thread still drops it

    def _done(self, entry: Entry, end_ns: int, blocked_ns: int) -> None:
        word, at, nbytes, issued, sequence, _, _, _ = entry
        entry[END] = end_ns
        done = head(Kind.DONE, flags=Flag.END_KNOWN) | word
        self._recorder.ring.write(end_ns, done, at, nbytes, issued, blocked_ns, sequence)

    def _note_sequence(self, group: Group, pg: Any, before: int, name: str) -> None:
        """Learns which sequence numbers are ours, and how many one call of a method takes.

        Some methods take none (point-to-point on NCCL) or two (a list reduce-scatter on gloo). What
        is coalesced is measured as a whole, at its end.
        """
        after = sequence_number(pg)
        if group.seen_sequences is not None:
            group.seen_sequences.update(range(before + 1, after + 1))
        if group.coalescing is None:
            group.extras[name] = after - before - 1
            group.extra += after - before - 1

    def flush_step(self) -> None:
        """At the end of a step: counts of idle hooks, and works that nobody waited for."""
        now = time.monotonic_ns()
        for (group, op, phase, kind), (count, nbytes) in self.counts.items():
            # fmt: off
            self._recorder.write(now, Kind.COUNTED, op, phase, 0, group, 0, count, nbytes, 1, kind)
            # fmt: on
        self.counts.clear()
        self.last_counted = None
        if self.open:
            self._flush_unwaited()

    def _flush_unwaited(self) -> None:
        for key, entry in list(self.open.items()):
            if type(entry[0]) is not list and entry[END]:
                self.open.pop(key, None)
                self._done(entry, entry[END], max(0, entry[HELD_NS]))
        while len(self.open) > 4096:
            self.open.pop(next(iter(self.open)))


def sequence_number(pg: Any) -> int:
    """How many collectives the group has issued, from Python and from C++."""
    try:
        return int(pg._get_sequence_number_for_group())
    except RuntimeError:  # backends without sequence numbers (MPI, fake)
        return -1


def nodes_of(ranks: list[int]) -> int:
    """How many nodes *ranks* are on, by what the launcher says of its nodes; 0 when it does not."""
    asked = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
    if not asked.isdigit() or int(asked) < 1:
        return 0
    return len({rank // int(asked) for rank in ranks})


def describe_group(pg: Any, framework: Callable[[Any], str] = lambda _: "") -> dict[str, Any]:
    """Size, ranks, description and backend of a process group, as the name table keeps them.

    *framework* knows the names that a framework gave its groups, and says "" of others.
    """
    world = torch.distributed.distributed_c10d._world
    ranks = sorted(world.pg_group_ranks.get(pg, {})) or list(range(pg.size()))
    try:
        name = str(pg.group_name)
    except RuntimeError:  # a group that its maker did not name
        name = ""
    desc = str(getattr(pg, "group_desc", "") or "")
    given = framework(pg)
    if given:
        label = given
    elif desc == "default_pg":
        label = "world"
    elif desc and desc != "undefined":
        label = desc
    else:
        label = f"pg{name or '?'}"
    devices = sorted({getattr(d, "type", str(d)) for d in getattr(pg, "_device_types", [])})
    return {
        "name": name,
        "label": label[:60],
        "size": pg.size(),
        "ranks": ranks[:1024],
        "nodes": nodes_of(ranks),
        "devices": devices or ["cpu"],
        "backend": str(world.pg_map.get(pg, ("?",))[0]),
    }
