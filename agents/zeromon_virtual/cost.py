"""What a kernel and a collective cost: rooflines and bus bandwidth.

A kernel takes the longer of its FLOPs over the device's rate and its bytes over the memory's bandwidth;
FLOPs are those of torch.utils.flop_counter. A collective takes a latency, and its bytes on the bus over
the bus bandwidth (nccl-tests, doc/PERFORMANCE.md).
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zeromon_virtual.spec import DeviceSpec

_NO_KERNEL = {
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "detach", "empty", "empty_like",
    "empty_strided", "lift_fresh", "new_empty", "new_empty_strided", "resize_", "set_",
}  # fmt: skip
_NO_KERNEL_OF = {"prim", "profiler", "c10d", "_c10d_functional"}


def bus_factor(op: str, ranks: int) -> float:
    """Returns the bytes on the bus of each rank, as a multiple of the payload."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def is_kernel(func: Any) -> bool:
    """Whether the operator *func* launches a kernel: a view does not."""
    if func.namespace in _NO_KERNEL_OF or func.overloadpacket.__name__ in _NO_KERNEL:
        return False
    return not func.is_view


def kernel_ns(func: Any, args: Any, kwargs: Any, out: Any, device: DeviceSpec) -> int:
    """Returns how long the kernel of *func* runs on *device*."""
    tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
    nbytes = sum(map(_nbytes, tensors))
    seconds = nbytes / device.bytes_per_second
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        rate = device.rate(_dtype(tensors))
        seconds = max(seconds, count(*args, **kwargs, out_val=out) / rate)
    return round(seconds * 1e9)


def _nbytes(tensor: Any) -> int:
    """Returns the bytes that a kernel reads or writes: those of an expanded tensor once."""
    return int(min(tensor.nbytes, tensor.untyped_storage().nbytes()))


def _dtype(tensors: list[Any]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.")
