"""Hooks on functional collectives: DTensor's, those of ``torch.compile``, and the program's own.

A functional collective is an operator: ``torch.ops._c10d_functional.all_reduce`` returns a tensor
before the communication has ended, and ``wait_tensor`` waits for it. C++ calls the process group, so the
hooks of :mod:`zeromon_agents.hooks.c10d` do not see it. An operator object calls its attribute ``_op``,
in eager programs and in compiled graphs, and the hook takes the place of that attribute. The operator
object stays the same, so torch.compile neither breaks a graph nor compiles again.

torch keeps the work of a collective under the storage of the tensor that it returns. So does the hook,
without a reference to it: under the address of the storage's memory. That is also the address of the
tensor where it is no view, and costs half as much to read as the storage.
"""

import functools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch

from zeromon.ring.codes import Flag, Kind, Op
from zeromon.ring.events import RECORD_SIZE, pack_head
from zeromon_agents.hooks.c10d import BLOCKED_NS, Collectives
from zeromon_agents.hooks.process_groups import DTYPES, Group, sequence_number, total_bytes
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.runtime.around import Patches, around
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import (
    END,
    EVENT,
    HELD_NS,
    IDLE,
    ISSUED_NS,
    OFF,
    ON,
    WORD,
    Entry,
    HookContext,
)

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
WAIT, WAIT_ALL = "wait_tensor", "wait_tensors"
BATCH = "batch_p2p_ops"
"""Sends and receives together: what torch.compile makes of ``batch_isend_irecv``."""
BLOCKING = "shard_dim_alltoall"
"""DTensor's own operator, which returns when the communication has ended."""
OPERATORS: dict[str, tuple[Op, bool]] = {
    "all_reduce": (Op.ALL_REDUCE, False),
    "all_reduce_": (Op.ALL_REDUCE, False),
    "all_reduce_coalesced": (Op.ALL_REDUCE, False),
    "all_reduce_coalesced_": (Op.ALL_REDUCE, False),
    "all_gather_into_tensor": (Op.ALL_GATHER, True),
    "all_gather_into_tensor_out": (Op.ALL_GATHER, True),
    "all_gather_into_tensor_coalesced": (Op.ALL_GATHER, True),
    "reduce_scatter_tensor": (Op.REDUCE_SCATTER, False),
    "reduce_scatter_tensor_out": (Op.REDUCE_SCATTER, False),
    "reduce_scatter_tensor_coalesced": (Op.REDUCE_SCATTER, False),
    "all_to_all_single": (Op.ALL_TO_ALL, False),
    "broadcast": (Op.BROADCAST, False),
    "broadcast_": (Op.BROADCAST, False),
    "isend": (Op.SEND, False),
    "irecv": (Op.RECV, False),
    BLOCKING: (Op.ALL_TO_ALL, False),
}
"""Operator -> operation, and whether its first argument is one rank's part of the payload."""
OTHERS = frozenset((WAIT, WAIT_ALL, BATCH, "_wrap_tensor_autograd", "mesh_get_process_group"))
"""The operators of the namespaces that issue no collective, or several of them."""

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Tensors whose communication an operator starts itself. Of a subclass it calls the handler, which calls
the operator again."""
GROUP = "group_name"
"""The argument of every operator that issues: a group's name, or the group."""
_MAX_PENDING = 4096
_ISSUED, _DONE = pack_head(Kind.ISSUED), pack_head(Kind.DONE)
_FAILED, _SPAN_KNOWN = pack_head(0, flags=Flag.FAILED), pack_head(0, flags=Flag.SPAN_KNOWN)
_DONE_FAILED = _DONE | _FAILED
# A name of the module costs a call less than one of the enclosing function, which each call copies.
_now_ns, _caller, _Tensor = time.monotonic_ns, threading.get_ident, torch.Tensor
_depth = torch._C._len_torch_dispatch_stack


class Functional:
    """The hooks on the operators, and the collectives that were not waited for yet."""

    def __init__(self, context: HookContext, collectives: Collectives, device: DeviceTimer) -> None:
        self._context = context
        self._collectives = collectives
        self._device = device
        self._names: dict[str, Group] = {}
        """Groups by the names that torch resolves, as long as none of the names is taken back."""
        self.pending: dict[int, Any] = {}
        """Address of a storage's memory -> the entries of the collectives under way, or a tuple (word,
        place, bytes, issued, sequence, held) of one on the host: a tuple costs less."""

    def install(self, patches: Patches) -> None:
        """Patches every operator that this torch has."""
        waits = torch.ops._c10d_functional.wait_tensor.default._schema.arguments
        if [argument.name for argument in waits] != ["tensor"]:
            return  # of a torch that is not known yet; its collectives are counted, untimed
        for namespace in NAMESPACES:
            for name in (*OPERATORS, WAIT, WAIT_ALL, BATCH):
                operator = getattr(getattr(torch.ops, namespace), name, None)
                if operator is None:
                    continue
                schema = [argument.name for argument in operator.default._schema.arguments]
                # Eager code calls the packet, compiled graphs an overload: each has its own `_op`
                for owner in (operator, *(getattr(operator, o) for o in operator.overloads())):
                    original = patches.find_original(owner, "_op")
                    hook = self._hook(name, original, str(operator), schema)
                    patches.set(owner, "_op", in_place_of(original, hook))

        for name in ("_unregister_process_group", "_unregister_all_process_groups"):
            # After destroy_process_group torch gives the same names to other groups
            forget = around(self._context, lambda *_, **__: self._names.clear(), where=name)
            patches.wrap_in(distributed_c10d, name, forget)

    def _hook(self, name: str, original: Any, qualified: str, schema: list[str]) -> Callable[..., Any]:
        if name == WAIT:
            return self.wait_hook(original)
        if name == WAIT_ALL:
            return self._wait_all_hook(original)
        if name == BATCH:
            return self._batch_hook(original, schema)
        issue = self.issue_hook(original, qualified, schema)
        return self._blocking_hook(issue) if name == BLOCKING else issue

    def _group_of(self, group: Any) -> Group:
        """Returns what is known of *group*, a process group or its name."""
        if not isinstance(group, str):
            return self._collectives.group_of(group)
        pg = distributed_c10d._resolve_process_group(group)
        registered = self._names[group] = self._collectives.group_of(pg)
        return registered

    def flush_step(self) -> None:
        """Forgets the oldest collectives that nobody waits for."""
        while len(self.pending) > _MAX_PENDING:
            del self.pending[next(iter(self.pending))]

    def issue_hook(  # noqa: C901 (inlined as that of c10d)
        self, original: Any, qualified: str, schema: list[str]
    ) -> Callable[..., Any]:
        """Returns the wrapper of an operator that issues."""
        context, collectives, pending = self._context, self._collectives, self.pending
        groups, names = collectives.groups, self._names
        next_slot, pack, records, mask = context.ring.slots
        name = qualified.rpartition(".")[2]
        op, per_rank = OPERATORS[name]
        keyword, group_at = schema[0], schema.index(GROUP)
        point_to_point, fresh = op in (Op.SEND, Op.RECV), not name.endswith(("_", "_out"))
        own_word = pack_head(0, op, flags=Flag.ASYNC)
        counts_calls = not point_to_point and not collectives.attached
        timed = self._device.device_type
        settled_group: Group | None = None  # that of the newest call, where a call takes one number

        def issue_with_hook(*args: Any, **kwargs: Any) -> Any:  # noqa: C901
            nonlocal settled_group
            mode = context.mode
            if not mode:
                return original(*args, **kwargs)
            group: Any = None
            entry = None
            sequence_before, began_ns = -1, 0
            try:
                payload = args[0] if args else kwargs[keyword]
                is_single = type(payload) is _Tensor
                tensor = payload if is_single or type(payload) is not list else payload[0]
                # a mode or a subclass calls the operator again, with plain tensors
                # On the meta device only shapes are computed: nothing is sent
                if (
                    (is_single or type(tensor) in _PLAIN)
                    and not (_python_dispatch._is_in_torch_dispatch_mode and _depth())
                    and not tensor.is_meta
                ):
                    try:
                        pg = args[group_at]
                    except IndexError:
                        pg = kwargs[GROUP]
                    try:
                        group = names[pg] if type(pg) is str else groups[id(pg)]
                    except KeyError:
                        group = self._group_of(pg)
                    nbytes = payload.nbytes if is_single else total_bytes(payload)
                    if per_rank:
                        nbytes *= group.size
                    group.issued = number = group.issued + 1
                    if counts_calls:
                        sequence = number - group.point_to_point
                    elif point_to_point:
                        group.point_to_point += 1
                        sequence = -group.point_to_point
                    else:
                        sequence = sequence_number(group.ref()) + 1
                        group.numbers.append(sequence)
                    dtype = DTYPES[tensor.dtype]
                    head_word, at = own_word | context.head_word, group.id | context.unit
                    engine, is_timed = context.engine, False
                    if _caller() != context.thread and collectives.is_apart(group):
                        # As in c10d: of no phase, timed in control steps, too, and counted on a device
                        head_word, at, engine = own_word, context.place_apart(group.id), 0
                        mode = IDLE if group.on_device else ON
                    if group.on_device:
                        is_timed = tensor.device.type == timed
                        if is_timed and self._device.captures():
                            mode = OFF  # nothing runs, so nothing would end the record
                    if mode == ON:
                        began_ns, n = _now_ns(), next_slot()
                        # fmt: off
                        pack(records, (n & mask) * RECORD_SIZE, n, began_ns, head_word | _ISSUED, at,
                             nbytes, sequence, dtype, engine, n)
                        # fmt: on
                        if is_timed:
                            entry = [head_word, at, nbytes, began_ns, sequence, 0, None, 0]
                            if name == BLOCKING:
                                self._device.issued(entry)
                    elif mode:
                        collectives.count(group.id, op, nbytes, dtype)
                    if group is settled_group:
                        pass
                    elif qualified in group.even:
                        settled_group = group
                    else:
                        extra = group.extras.get(qualified)
                        if extra is None:
                            sequence_before = sequence_number(group.ref())
                        elif extra:
                            group.extra += extra
            except Guard.CAUGHT as error:
                context.guard.note(error, qualified)
            try:
                result = original(*args, **kwargs) if kwargs else original(*args)
            except BaseException:
                with suppress(Guard.CAUGHT):  # the caller must get the call's own error
                    if began_ns:
                        entry = [head_word | _FAILED, at, nbytes, began_ns, sequence, 0, None, 0]
                        collectives.done(entry, _now_ns(), 0)
                raise
            try:
                if sequence_before >= 0:
                    collectives.note_sequence(group, group.ref(), sequence_before, qualified)
                if began_ns:
                    held_ns = _now_ns() - began_ns
                    if entry is not None:
                        entry[HELD_NS] = held_ns
                        if entry[EVENT] is None:  # it begins when what the call copied is there
                            self._device.issued(entry)
                    elif fresh and type(result) is _Tensor:
                        # Not for `all_reduce_`: an argument may be a view, with another address
                        key = result.data_ptr() or _storage_key(result)
                        pending[key] = head_word, at, nbytes, began_ns, sequence, held_ns
                        return result
                    self._keep(
                        result, entry or [head_word, at, nbytes, began_ns, sequence, 0, None, held_ns]
                    )
            except Guard.CAUGHT as error:
                context.guard.note(error, qualified)
            return result

        return issue_with_hook

    def _keep(self, result: Any, entry: Entry) -> None:
        """Keeps *entry* of an operator with several results, or whose result is its argument."""
        is_list = type(result) is list
        for tensor in result if is_list else (result,):
            key = _storage_key(tensor)
            pending_entry = self.pending.get(key)
            if pending_entry is None and not is_list and entry[EVENT] is None:
                self.pending[key] = (*entry[:END], entry[HELD_NS])
            else:
                # In-place operators may issue again on a storage: as in torch, one wait ends all of them
                self.pending[key] = [*_entries_of(pending_entry), entry]

    def wait_hook(self, original: Any) -> Callable[..., Any]:
        """Returns the wrapper of ``wait_tensor``."""
        context, pending, pop = self._context, self.pending, self.pending.pop
        next_slot, pack, records, mask = context.ring.slots

        def wait_with_hook(tensor: Any) -> Any:
            entry = None
            if pending and context.mode:
                try:
                    if type(tensor) is _Tensor or type(tensor) in _PLAIN:
                        # A view that is waited for has another address than its storage
                        entry = pop(tensor.data_ptr(), None) or pop(_storage_key(tensor), None)
                except Guard.CAUGHT as error:
                    context.guard.note(error, WAIT)
            if entry is None:
                return original(tensor)
            if type(entry) is list:
                if len(entry) > 1 or entry[0][EVENT] is not None or entry[0][END]:
                    return self._wait_for_entries(original, tensor, entry)
                entry[0][END] = _now_ns()  # for the waits for the other results of the operator
                entry = (*entry[0][:END], entry[0][HELD_NS])
            head_word, at, nbytes, issued, sequence, held_ns = entry
            reached, outcome = _now_ns(), _DONE_FAILED
            try:
                result = original(tensor)
                outcome = _DONE
                return result
            finally:
                left_ns = _now_ns()
                try:
                    blocked = left_ns - reached
                    if blocked > BLOCKED_NS:
                        outcome |= _SPAN_KNOWN
                    n = next_slot()
                    # fmt: off
                    pack(records, (n & mask) * RECORD_SIZE, n, left_ns, head_word | outcome, at,
                         nbytes, issued, blocked + held_ns, sequence, n)
                    # fmt: on
                except Guard.CAUGHT as error:
                    context.guard.note(error, WAIT)

        return wait_with_hook

    def _wait_all_hook(self, original: Any) -> Callable[..., Any]:
        """Returns the wrapper of ``wait_tensors`` (since torch 2.14)."""
        context, pop, note = self._context, self.pending.pop, self._context.guard.note

        def wait_with_hook(tensors: Any) -> Any:
            entries: list[Entry] = []
            if context.mode:
                try:
                    keys = [_storage_key(t) for t in tensors if type(t) in _PLAIN]
                    entries = [e for key in keys if (k := pop(key, None)) for e in _entries_of(k)]
                except Guard.CAUGHT as error:
                    note(error, WAIT_ALL)
            return self._wait_for_entries(original, tensors, entries) if entries else original(tensors)

        return wait_with_hook

    def _blocking_hook(self, issue: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the wrapper of an operator that waits itself, around that of its issue."""
        collectives, note = self._collectives, self._context.guard.note

        def issue_and_wait(*args: Any, **kwargs: Any) -> Any:
            result = issue(*args, **kwargs)
            try:
                if type(result) in _PLAIN:
                    for entry in _entries_of(self.pending.pop(_storage_key(result), None)):
                        if entry[EVENT] is not None:
                            self._device.ran_here(entry)
                        else:
                            collectives.done(entry, time.monotonic_ns(), entry[HELD_NS])
            except Guard.CAUGHT as error:
                note(error, BLOCKING)
            return result

        return issue_and_wait

    def _batch_hook(self, original: Any, schema: list[str]) -> Callable[..., Any]:
        """Returns the wrapper of ``batch_p2p_ops``: each tensor that it returns can be waited for."""
        context, note = self._context, self._context.guard.note

        def issue_batch(*args: Any, **kwargs: Any) -> Any:
            entries: list[Entry] = []
            group, sequence_before, calls = None, 0, 0
            if context.mode:
                try:
                    arguments = dict(zip(schema, args, strict=False)) | kwargs
                    if is_real(arguments["tensors"]):
                        group, calls = self._group_of(arguments[GROUP]), len(arguments["tensors"])
                        sequence_before = sequence_number(group.ref())
                        entries = self._issue_batch(group, arguments)
                except Guard.CAUGHT as error:
                    note(error, BATCH)
            try:
                results = original(*args, **kwargs)
            except BaseException:
                with suppress(Guard.CAUGHT):
                    for entry in entries:
                        entry[WORD] |= _FAILED
                        self._collectives.done(entry, time.monotonic_ns(), 0)
                raise
            try:
                if group is not None:
                    group.extra += sequence_number(group.ref()) - sequence_before - calls
                for position, entry in enumerate(entries):
                    counts = entry[EVENT] is not None or not position  # of the host, once for all
                    entry[HELD_NS] = time.monotonic_ns() - entry[ISSUED_NS] if counts else 0
                    self._keep(results[position], entry)
            except Guard.CAUGHT as error:
                note(error, BATCH)
            return results

        return issue_batch

    def _issue_batch(self, group: Group, arguments: dict[str, Any]) -> list[Entry]:
        """Writes the issue of each send and receive, or counts it in a control step."""
        context, entries = self._context, list[Entry]()
        for name, tensor in zip(arguments["op_list"], arguments["tensors"], strict=True):
            op, _ = OPERATORS[name]
            group.issued += 1
            group.point_to_point += 1
            nbytes, dtype = tensor.nbytes, DTYPES.get(tensor.dtype, 0)
            is_timed = group.on_device and tensor.device.type == self._device.device_type
            # In a capture nothing runs, so nothing would end the record
            if is_timed and self._device.captures():
                continue
            if context.mode != ON:
                self._collectives.count(group.id, op, nbytes, dtype)
                continue
            head_word = pack_head(0, op, flags=Flag.ASYNC) | context.head_word
            at = group.id | context.unit
            now_ns, sequence = time.monotonic_ns(), -group.point_to_point
            context.ring.write(now_ns, head_word | _ISSUED, at, nbytes, sequence, dtype, context.engine)
            entry: Entry = [head_word, at, nbytes, now_ns, sequence, 0, None, 0]
            if is_timed:
                self._device.issued(entry)
            entries.append(entry)
        return entries

    def _wait_for_entries(self, original: Any, tensor: Any, all_entries: list[Entry]) -> Any:
        """Waits for device work, or for the collectives whose result one tensor is."""
        entries = [entry for entry in all_entries if not entry[END]]
        if not entries:  # another result of the same operator was waited for
            return original(tensor)
        try:
            return self._collectives.wait_for_entries(original, tensor, entries, (), {})
        finally:
            for entry in entries:
                entry[END] = entry[END] or time.monotonic_ns()


def operators_of(namespace: str) -> set[str]:
    """Returns the names of the operators of a namespace, also of those that nothing has used yet."""
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return {name.partition(".")[0] for prefix, _, name in names if prefix == namespace}


def unknown_operators() -> list[str]:
    """Returns a newer torch's operators of the namespaces, which may communicate."""
    return sorted(
        {n for namespace in NAMESPACES for n in operators_of(namespace)} - set(OPERATORS) - OTHERS
    )


def is_real(tensors: Any) -> bool:
    """Returns whether an operator runs with *tensors* itself: no mode or subclass calls it again."""
    if _python_dispatch._is_in_torch_dispatch_mode and torch._C._len_torch_dispatch_stack():
        return False
    return all(type(tensor) in _PLAIN and not tensor.is_meta for tensor in tensors)


def _entries_of(pending_entry: Any) -> list[Entry]:
    """Returns what :attr:`Functional.pending` holds as entries."""
    if type(pending_entry) is tuple:
        return [[*pending_entry[:END], 0, None, pending_entry[END]]]
    return pending_entry or []


def _storage_key(tensor: Any) -> int:
    """Returns the key of the storage of *tensor*: its memory, or itself where it has none."""
    storage = tensor.untyped_storage()
    # All empty tensors have the address 0; a negative number cannot be the address of another's memory
    address: int = storage.data_ptr() or -storage._cdata
    return address


def in_place_of(original: Any, hook: Callable[..., Any]) -> Any:
    """Returns an object that calls *hook* and has the hash of *original*.

    The hash of an operator is that of its ``_op``, and torch keeps operators in sets and as keys.
    """
    number = hash(original)
    # a call of a partial costs 50 ns less than one of an object with a __call__ in Python
    # `hash` looks at the class and not at the object, so each hook has a class of its own
    replacement = type("Hook", (functools.partial,), {"__hash__": lambda _: number})(hook)
    replacement.__module__ = original.__module__  # torch reads it to look the operator up again
    return replacement
