"""Which methods and dtypes communicate, and how large what they send is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from zeromon.ring.events import Dtype, Op


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

DTYPES = {dtype: 0 for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)} | {
    getattr(torch, code.name.lower()): code for code in Dtype if hasattr(torch, code.name.lower())
}
"""Every dtype of this torch -> its number in records, 0 where it has none."""


def total_bytes(payload: Any) -> int:
    """Returns the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(payload, torch.Tensor):
        return int(payload.nbytes)
    return sum(total_bytes(item) for item in payload)


def first_tensor(payload: Any) -> Any:
    """Returns the first tensor of nested lists, which may be one itself."""
    while isinstance(payload, (list, tuple)) and payload:
        payload = payload[0]
    return payload
