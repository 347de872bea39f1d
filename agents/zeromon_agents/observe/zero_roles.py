"""Memory roles of a DeepSpeed engine's tensors.

Each private name of DeepSpeed's optimizers has a canary test. A name that this version lacks leaves its
role out.
"""

from typing import Any

from zeromon.ring.events import Role
from zeromon_agents.observe.census import Claims, OnDisk

FLAT: tuple[tuple[str, Role], ...] = (
    # stage 3
    ("lp_param_buffer", Role.SHARDED_PARAM),
    ("param_groups_fp16_flat_cpu_memory", Role.SHARDED_PARAM),
    ("fp32_partitioned_groups_flat", Role.MASTER_PARAM),
    ("grad_partitions_flat_buffer", Role.SHARDED_GRAD),
    # stages 1 and 2
    ("bit16_groups_flat", Role.UNSHARDED_PARAM),
    ("single_partition_of_fp32_groups", Role.MASTER_PARAM),
    ("averaged_gradients", Role.SHARDED_GRAD),
    ("all_grad_tensors", Role.SHARDED_GRAD),
    ("param_buffer_of_bit16_for_cpu_offload_groups", Role.SWAP_BUFFER),
    ("temp_grad_buffer_for_cpu_offload", Role.SWAP_BUFFER),
    ("temp_grad_buffer_for_gpu_offload", Role.SWAP_BUFFER),
    ("accumulated_grads_in_cpu", Role.UNSHARDED_GRAD),
    # BF16_Optimizer
    ("bf16_groups_flat", Role.UNSHARDED_PARAM),
    ("fp32_groups_flat_partition", Role.MASTER_PARAM),
    ("fp32_groups_gradients_flat", Role.UNSHARDED_GRAD),
    # stage 0 in half precision
    ("fp16_groups_flat", Role.UNSHARDED_PARAM),
    ("fp32_groups_flat", Role.MASTER_PARAM),
    ("fp32_groups", Role.MASTER_PARAM),
)
"""Attributes of the ZeRO optimizer, in the order in which they claim storages."""
_MASTERS = (
    ("single_partition_of_fp32_groups", Role.SHARDED_GRAD),
    ("fp32_partitioned_groups_flat", Role.SHARDED_GRAD),
    ("fp32_groups_flat", Role.UNSHARDED_GRAD),
)
"""Those that hold master weights, and the role of the masters' gradients."""


def claims(engine: Any) -> Claims:
    """Yields (role, tensors) of *engine* at any ZeRO stage."""
    optimizer = engine.optimizer
    params = list(engine.module.parameters())
    yield from _swapped(optimizer, params)
    for name, role in FLAT:
        yield role, getattr(optimizer, name, None)
    for name, role in _MASTERS:
        for master in getattr(optimizer, name, None) or ():
            yield role, getattr(master, "grad", None)
    buckets = getattr(optimizer, "ipg_buckets", None)
    for bucket in buckets.values() if isinstance(buckets, dict) else ():
        yield Role.REDUCE_SCATTER, getattr(bucket, "buffer", None)
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in getattr(inner, "state", {}).values():
        if isinstance(state, dict):  # a step counter has no dimension
            yield Role.OPTIMIZER_STATE, [v for v in state.values() if getattr(v, "ndim", 0)]
    yield from _of_parameters(params)
    yield Role.BUFFER, list(engine.module.buffers())


def _of_parameters(params: list[Any]) -> Claims:
    for param in params:
        yield Role.SHARDED_PARAM, getattr(param, "ds_tensor", None)
        yield Role.SECONDARY_PARAM, getattr(param, "ds_secondary_tensor", None)
        yield Role.UNSHARDED_PARAM, param.data
        yield Role.UNSHARDED_GRAD, param.grad
        yield Role.UNSHARDED_GRAD, getattr(param, "grad_accum", None)


def _swapped(optimizer: Any, params: list[Any]) -> Claims:
    """Yields swap buffers first, because a parameter that was read in is a view of one."""
    swapper = next((s for s in (getattr(p, "nvme_swapper", None) for p in params) if s), None)
    if swapper is not None:
        yield Role.SWAP_BUFFER, getattr(swapper, "buffers", None)
        yield Role.SWAP_BUFFER, getattr(swapper, "partitioned_swap_buffer", None)
        numel = sum(
            swapper.param_id_to_numel.get(number, 0)
            for number in getattr(swapper, "id_to_path", ())
        )
        yield Role.SHARDED_PARAM, OnDisk(numel * swapper.swap_element_size)
    states = getattr(optimizer, "optimizer_swapper", None)
    if states is None:
        return
    manager = getattr(states, "swap_buffer_manager", None)
    yield Role.SWAP_BUFFER, getattr(manager, "all_buffers", None)
    for info in getattr(states, "swap_params_info", {}).values():
        size = info.numel() * info.dtype().itemsize
        yield Role.MASTER_PARAM, OnDisk(size)
        yield Role.OPTIMIZER_STATE, OnDisk(size * (info.num_tensors() - 1))
        lengths = (piece.length for piece in info.swapped_gradients.values())
        yield Role.SHARDED_GRAD, OnDisk(sum(lengths) * info.dtype().itemsize)
        yield Role.SHARDED_GRAD, list(info.unswapped_gradients.values())
