"""Stand-ins for what frameworks compile by nvcc, of operators that the device has a model of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def _multi_tensor_adam(
    _chunk: int, flag: Any, tensors: Any, lr: float, beta1: float, beta2: float, eps: float, step: int,
    decoupled: int, _bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Updates parameters as DeepSpeed's kernel does: in place, without memory of its own."""
    grads, params, averages, squares = tensors
    steps = flag.view(torch.float32).fill_(step)  # the kernel never reads the flag
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        params, grads, averages, squares, [], [steps] * len(params), lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip


DEEPSPEED_OPERATORS = {"fused_adam": SimpleNamespace(multi_tensor_adam=_multi_tensor_adam)}
"""DeepSpeed's extension in CUDA C++ to its stand-in; those in plain C++ are compiled as ever."""


def adapt_deepspeed(builder: Any) -> None:
    """Gives DeepSpeed's builder of extensions our stand-ins for those that need nvcc."""
    build = builder.OpBuilder.jit_load

    def jit_load(self: Any, verbose: bool = True) -> Any:
        is_cuda = isinstance(self, builder.CUDAOpBuilder)
        return (is_cuda and DEEPSPEED_OPERATORS.get(self.name)) or build(self, verbose)

    builder.OpBuilder.jit_load = jit_load
