"""Process groups: what the collective hooks keep of each, and how the name table describes it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from zeromon.ring.codes import Dtype, Op
from zeromon_agents.runtime.hook_context import Entry

_BASE = torch._C._distributed_c10d.ProcessGroup


@dataclass(slots=True, eq=False)
class Group:
    """The state that the hooks keep of a process group, without keeping it alive."""

    id: int
    ref: Any
    size: int = field(kw_only=True)
    on_device: bool = field(kw_only=True)
    """True if its collectives may run on an accelerator."""
    base: int = field(kw_only=True)
    """The group's own sequence number when the hooks first met it."""
    apart: bool = False
    """True if a thread beside that of training has called it: its progress is none of a step."""
    issued: int = 0
    """Calls that passed the hooks."""
    matched: int = 0
    """:attr:`issued` at the last call that the dispatcher announced; -1 during a call that issues
    several collectives and is counted as a whole."""
    point_to_point: int = 0
    """Sends and receives among the calls, numbered apart because only two ranks call each."""
    extra: int = 0
    """Sequence numbers that the calls took beyond one each."""
    extras: dict[str, int] = field(default_factory=dict)
    """Method -> sequence numbers that one call takes beyond one, measured at its first use after the
    warm-up."""
    even: set[str] = field(default_factory=set)
    """The methods of which that is 0."""
    coalesced_from: int = 0
    """Sequence number minus calls when coalescing began."""
    explained: int = 0
    """Sequence numbers of C++ collectives that were reported already."""
    coalescing: list[Entry] | None = None
    numbers: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    """Where the agent was attached: sequence numbers of the newest collectives the hooks saw."""
    seen_sequences: set[int] | None = field(default_factory=set)
    """During warm-up: the sequence numbers of calls that passed the hooks."""


def sequence_number(pg: Any) -> int:
    """Returns how many collectives *pg* has issued, from Python and C++; -1 where it does not count."""
    try:
        return int(pg._get_sequence_number_for_group())
    except RuntimeError:  # backends without sequence numbers (MPI, fake)
        return -1


def text_of(pg: Any, attribute: str) -> str | None:
    """Returns a text of *pg*, "" where a group written in Python has none; None for what is no group."""
    try:
        return str(getattr(pg, attribute))
    except RuntimeError:
        return ""
    except AttributeError:
        return None


def member_ranks(pg: Any) -> list[int]:
    """Returns the ranks of a process group, as the world numbers them."""
    ranks = torch.distributed.distributed_c10d._world.pg_group_ranks
    # torch does not list a group that the script has constructed itself
    return sorted(ranks.get(pg, {})) or list(range(pg.size()))


def nodes_of(ranks: list[int]) -> int:
    """Returns how many nodes *ranks* are on, by the launcher's ranks per node; 0 where it sets none."""
    per_node = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
    if not per_node.isdigit() or int(per_node) < 1:
        return 0
    return len({rank // int(per_node) for rank in ranks})


def backend_of(pg: Any) -> str:
    """Returns the backend that *pg* was asked for: ``nccl``, ``cpu:gloo,cuda:nccl``; "?" if unknown."""
    return str(torch.distributed.distributed_c10d._world.pg_map.get(pg, ("?",))[0])


def describe_group(pg: Any, framework: Callable[[Any], str] = lambda _: "") -> dict[str, Any]:
    """Returns size, ranks, label and backend of a process group, as the name table keeps them.

    *framework* returns the name that a framework gave to a group, and "" for any other group.
    """
    ranks = member_ranks(pg)
    name, desc = text_of(pg, "group_name") or "", text_of(pg, "group_desc")
    framework_label = framework(pg)
    if framework_label:
        label = framework_label
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
        # The name table has 256 KiB for all names: the ranks of large groups would fill it
        "ranks": ranks[:1024],
        "nodes": nodes_of(ranks),
        "devices": devices or ["cpu"],
        "backend": backend_of(pg),
        "in_python": isinstance(pg, _BASE) and type(pg) is not _BASE,
    }


# ---- which methods and dtypes communicate, and how large what they send is ----------------------


class Payload(NamedTuple):
    """Where a method's payload S is: the argument's position and name.

    *per_rank*: the argument is one rank's part, and S is the group's size times it.
    """

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
    "gather_single": Payload(Op.GATHER, 1, "input", per_rank=True),
    "gather_into_tensor": Payload(Op.GATHER, 1, "input", per_rank=True),
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
"""The methods that communicate, under every name that a supported torch gives them."""

# `hasattr`, as Dtype.UNKNOWN is no dtype of torch
DTYPES = {dtype: 0 for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)} | {
    getattr(torch, code.name.lower()): code for code in Dtype if hasattr(torch, code.name.lower())
}
"""Every dtype of this torch -> its number in records, 0 where it has none."""


def total_bytes(payload: Any) -> int:
    """Returns the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(payload, torch.Tensor):
        return int(payload.nbytes)
    return sum(map(total_bytes, payload))


def first_tensor(payload: Any) -> Any:
    """Returns the first tensor of nested lists, which may be one itself."""
    while isinstance(payload, (list, tuple)) and payload:
        payload = payload[0]
    return payload
