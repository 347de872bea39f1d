"""What offloading copies between device and host, by the arguments of the methods that copy."""

import time
from collections.abc import Callable
from typing import Any

from zeromon.ring.events import Path
from zeromon_agents.hooks.deepspeed.engines import Engine, Engines
from zeromon_agents.observe import accelerator
from zeromon_agents.observe.offload import Transfers
from zeromon_agents.runtime.around import SKIP

Copied = list[tuple[Path, int]]
"""Direction and bytes of each copy."""


class Copies:
    """Runs before and after a method that copies gradients or parameters."""

    def __init__(self, engines: Engines, transfers: Transfers, read: Callable[..., Copied]) -> None:
        self._engines = engines
        self._transfers = transfers
        self._read = read

    def begins(self, optimizer: Any, *args: Any, **kwargs: Any) -> object:
        """Returns what the method is going to copy, and the time in ns; SKIP without offload."""
        known = self._engines.by_optimizer(optimizer)
        if known is None or not (known.offloads_optimizer or known.offloads_params):
            return SKIP
        return self._read(optimizer, known, *args, **kwargs), time.monotonic_ns()

    def ends(self, state: tuple[Copied, int] | None, *_: Any) -> None:
        """Adds the copies. On a device they are asynchronous, and only their bytes are known."""
        if state is None:
            return
        copied, started = state
        spent = 0 if accelerator.ready() is not None else time.monotonic_ns() - started
        for path, nbytes in copied:
            self._transfers.add(path, nbytes, spent, spent)


def gradient_offloaded(optimizer: Any, _: Engine, param: Any) -> Copied:
    """Stages 1 and 2: this rank's part of one gradient, in the precision of the master weights."""
    numel = optimizer.grad_position[optimizer.get_param_id(param)][3]
    return [(Path.DEVICE_TO_HOST, numel * optimizer.master_weights_and_grads_dtype.itemsize)]


def gradient_accumulated(optimizer: Any, _: Engine, param: Any) -> Copied:
    """Stages 1 and 2 during accumulation: the whole gradient in from the host, and out again."""
    copied = [(Path.DEVICE_TO_HOST, param.numel() * param.element_size())]
    if optimizer.micro_step_id > 0:
        copied.append((Path.HOST_TO_DEVICE, copied[0][1]))
    return copied


def gradients_partitioned(optimizer: Any, known: Engine, _: Any, grad_partitions: Any) -> Copied:
    """Stage 3: the shards of a bucket's gradients, to the host at the accumulation boundary.

    Where the gradients' own buffer is on the host, they are staged there first and come back.
    """
    if not known.offloads_optimizer:
        return []
    numel = sum(partition.numel() for partition in grad_partitions)
    copied = []
    buffer = optimizer.grad_partitions_flat_buffer
    if any(partition.device != buffer.device for partition in grad_partitions[:1]):
        staged = numel * buffer.element_size()
        copied += [(Path.DEVICE_TO_HOST, staged), (Path.HOST_TO_DEVICE, staged)]
    if optimizer.is_gradient_accumulation_boundary():
        size = optimizer.master_weights_and_grads_dtype.itemsize
        copied.append((Path.DEVICE_TO_HOST, numel * size))
    return copied


def parameters_updated(optimizer: Any, known: Engine, sub_group_id: int) -> Copied:
    """Stage 3: the updated shard of one sub-group returns to the device."""
    flat = optimizer.fp16_partitioned_groups_flat[sub_group_id]
    if flat is None or not known.offloads_optimizer or known.offloads_params:
        return []
    return [(Path.HOST_TO_DEVICE, flat.nbytes)]
