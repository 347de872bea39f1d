"""Runs each operator of CUDA once more on the CPU, on the same bytes: device memory is host memory.

The operator of CUDA takes its time on the device's clock and makes its results; the CPU's operator
fills them. Losses are then real, and an operator costs about 0.1 ms of host time. Not in replays of
CUDA graphs, and not in compiled kernels.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_model = ctypes.CDLL("libvgpu.so")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_AS_THEY_ARE = {"c10d", "_c10d_functional", "prim", "profiler"}
_NO_VALUES = torch.ops.aten.record_stream.default
_SCALAR = torch.ops.aten._local_scalar_dense.default
_SOFTMAX = torch.ops.aten._softmax.default
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def on_host(value: Any) -> Any:
    """Returns the bytes as a tensor of the CPU; the CPU for a device."""
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    layout = value.storage_offset(), value.size(), value.stride()
    return torch.empty(0, dtype=value.dtype).set_(flat, *layout)


def to_device(value: Any) -> Any:
    """A tensor of the device with the bytes of tensor of the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    result = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")
    on_host(result).copy_(value)
    return result


def fill_with_results(result: Any, computed: Any) -> None:
    """Writes what the CPU computed into what CUDA result."""
    if isinstance(result, torch.Tensor) and result.is_cuda and result.numel():
        target = on_host(result)
        if target.data_ptr() != computed.data_ptr():
            target.copy_(computed)
    elif isinstance(result, (list, tuple)):
        for tensor, value in zip(result, computed, strict=True):
            fill_with_results(tensor, value)


def is_view(func: Any) -> bool:
    """Returns whether the result is a view of an argument: it has the argument's bytes."""
    returned = [tensor.alias_info for tensor in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def uses_device(values: Any) -> bool:
    """Returns whether a tensor of the device or the device itself is among the arguments."""
    return any(
        tensor.is_cuda if isinstance(tensor, torch.Tensor) else tensor.type == "cuda"
        for tensor in tree_leaves(values)
        if isinstance(tensor, (torch.Tensor, torch.device))
    )


def has_no_bytes(values: Any) -> bool:
    """Returns whether a fake tensor is among the values: its own mode is below this tensor."""
    tensors = (tensor for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor))
    return any(type(tensor) not in _PLAIN for tensor in tensors)


def has_size_by_value(func: Any, args: Any) -> bool:
    """Returns whether only the bytes tell the result or its size, as of an index by a mask."""
    if func is torch.ops.aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return bool(_BY_VALUE & set(func.tags))


def widen(value: Any) -> Any:
    """A tensor of 16 bits as tensor of 32."""
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


def compute_on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """The operator's result by the CPU."""
    host_args, host_kwargs = tree_map(on_host, (args, kwargs))
    if func is _SOFTMAX and host_args[2]:  # from half to float: CUDA's alone
        host_args = (host_args[0].float(), host_args[1], False)
    try:
        try:
            return func(*host_args, **host_kwargs)
        except RuntimeError:
            # CUDA takes 16 bits beside 32; the CPU in some operators does not.
            if func._schema.is_mutable:
                raise
            return func(*tree_map(widen, host_args), **tree_map(widen, host_kwargs))
    except (NotImplementedError, RuntimeError) as error:
        raise NotImplementedError(f"vgpu: no arithmetic for {func.name()}: {error}") from error


class Arithmetic(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Runs each operator on the device and then on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        # Fused attention of CUDA has no counterpart of the same signature on the CPU.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _PLAIN and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor, say: it dispatches what is inside
        if (
            func.namespace in _AS_THEY_ARE
            or func is _NO_VALUES
            or not uses_device((args, kwargs))
            or is_view(func)
        ):
            return func(*args, **kwargs)
        if has_no_bytes((args, kwargs)):
            return func(*args, **kwargs)
        _model.vgpu_drain()  # the CPU reads bytes at once: what is on its way must have come
        if func is _SCALAR:
            return func(*args, **kwargs)
        if has_size_by_value(func, args):
            torch.cuda.current_stream().synchronize()
            return tree_map(to_device, compute_on_host(func, args, kwargs))
        result = func(*args, **kwargs)
        if has_no_bytes(result):
            return result
        _model.vgpu_drain()
        fill_with_results(result, compute_on_host(func, args, kwargs))
        return result
