"""What C++ issues past our hooks: DDP's reducer, functional collectives, compiled graphs.

The group's own sequence number says how many there were. What they were is known only

* in the first steps, from the c10d Flight Recorder, which lists each one;
* for DDP's gradient buckets, from the reducer's own list of bucket sizes.

The rest is reported as counted, operation unknown: we never pretend to see all.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from zeromon.events import Kind, Op, Phase
from zeromon_agents.c10d import Collectives, Group, sequence_number
from zeromon_agents.recorder import Recorder

WARM_UP_STEPS = 3
_MOST_ENTRIES = 400  # a dump costs about 9 us an entry, once, in a step that warms up anyway

Buckets = Callable[[int], list[int]]
"""Gradient bucket sizes in bytes of the DDP models on a group, given the group's id."""

_ITEMSIZE = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1,
    "Byte": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "ComplexFloat": 8,
}  # fmt: skip

_NAMES = (
    ("all_gather", Op.ALL_GATHER), ("allgather", Op.ALL_GATHER),
    ("reduce_scatter", Op.REDUCE_SCATTER), ("all_reduce", Op.ALL_REDUCE),
    ("allreduce", Op.ALL_REDUCE), ("broadcast", Op.BROADCAST), ("all_to_all", Op.ALL_TO_ALL),
    ("alltoall", Op.ALL_TO_ALL), ("gather", Op.GATHER), ("scatter", Op.SCATTER),
    ("barrier", Op.BARRIER), ("reduce", Op.REDUCE), ("send", Op.SEND), ("recv", Op.RECV),
)  # fmt: skip


class Unseen:
    """Explains, at the end of a step, the sequence numbers that our hooks did not make."""

    def __init__(self, recorder: Recorder, collectives: Collectives, buckets: Buckets) -> None:
        self._recorder = recorder
        self._collectives = collectives
        self._buckets = buckets

    def account(self, step: int) -> None:
        """Reports what was issued from C++ since the last call."""
        self._watch_new_groups()
        flight: list[dict[str, Any]] | None = None
        for group in list(self._collectives.groups.values()):
            pg = group.ref()
            if pg is None:
                continue
            sequence = sequence_number(pg) - group.base
            if sequence < 0:
                continue
            seen = group.issued + group.extra
            missing = sequence - seen - group.explained
            if missing > 0:
                few = sequence + group.base < _MOST_ENTRIES
                if step <= WARM_UP_STEPS and flight is None and few:
                    flight = read_flight_recorder()
                self._explain(group, missing, flight, str(pg.group_name))
            shift = group.base if self._collectives.joined else 0
            # fmt: off
            self._recorder.write(time.monotonic_ns(), Kind.GROUP_SEQUENCE, 0, 0, 0, group.id, 0,
                                 sequence + shift, seen + shift, 0, 0)
            # fmt: on

    def _watch_new_groups(self) -> None:
        groups = torch.distributed.distributed_c10d._world.pg_map
        if len(groups) > len(self._collectives.groups):
            for pg in list(groups):
                if hasattr(pg, "group_name"):
                    self._collectives.group_of(pg)

    def _explain(
        self, group: Group, missing: int, flight: list[dict[str, Any]] | None, name: str
    ) -> None:
        group.explained += missing
        listed = self._from_flight_recorder(group, flight or [], name)
        if sum(listed[op][0] for op in listed) == missing:
            for op, (count, nbytes) in listed.items():
                self._report(group, op, count, nbytes)
            return
        buckets = self._buckets(group.id)
        if buckets and missing % len(buckets) == 0:
            rounds = missing // len(buckets)
            self._report(group, Op.ALL_REDUCE, missing, rounds * sum(buckets))
            return
        self._report(group, Op.NONE, missing, 0)

    def _from_flight_recorder(
        self, group: Group, flight: list[dict[str, Any]], name: str
    ) -> dict[Op, tuple[int, int]]:
        ours = group.seen_sequences
        if ours is None:
            return {}
        found: Counter[Op] = Counter()
        nbytes: Counter[Op] = Counter()
        for entry in flight:
            number = entry.get("collective_seq_id", 0)
            group_name = (entry.get("process_group") or ("",))[0]
            if group_name != name or number <= group.base or number in ours or entry.get("is_p2p"):
                continue
            ours.add(number)  # explained once
            op = op_of(str(entry.get("profiling_name", "")))
            found[op] += 1
            nbytes[op] += payload_bytes(op, entry)
        return {op: (found[op], nbytes[op]) for op in found}

    def _report(self, group: Group, op: Op, count: int, nbytes: int) -> None:
        phase = Phase.BACKWARD if op == Op.ALL_REDUCE else Phase.OTHER
        # fmt: off
        self._recorder.write(time.monotonic_ns(), Kind.COUNTED, op, phase, 0, group.id, 0,
                             count, nbytes, 0, 0)
        # fmt: on


def op_of(profiling_name: str) -> Op:
    """The operation behind a Flight Recorder name such as ``gloo:all_reduce``."""
    name = profiling_name.rpartition(":")[2].lower()
    return next((op for part, op in _NAMES if part in name), Op.NONE)


def payload_bytes(op: Op, entry: dict[str, Any]) -> int:
    """S of a Flight Recorder entry: the whole, unsharded size."""
    side = "output" if op == Op.ALL_GATHER else "input"
    sizes, dtypes = entry.get(f"{side}_sizes") or [], entry.get(f"{side}_dtypes") or []
    total = 0
    for position, size in enumerate(sizes):
        numel = 1
        for extent in size:
            numel *= extent
        dtype = dtypes[position] if position < len(dtypes) else (dtypes or ["Byte"])[-1]
        total += numel * _ITEMSIZE.get(dtype, 1)
    return total


def read_flight_recorder(*, only_active: bool = False) -> list[dict[str, Any]]:
    """The recorder's entries without stack traces; empty where there is none or it is off.

    The pickle is made by torch's C++ in this very call: nothing from outside is unpickled.
    """
    distributed = torch._C._distributed_c10d
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(distributed, name, None)
        if dump is None:
            continue
        content = pickle.loads(
            dump(includeCollectives=True, includeStackTraces=False, onlyActive=only_active)
        )
        entries = content.get("entries") if isinstance(content, dict) else None
        if entries:
            return list(entries)
    return []
