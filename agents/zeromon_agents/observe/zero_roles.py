"""Memory roles of a DeepSpeed engine's tensors.

Each private name of DeepSpeed's optimizers has a canary test. A name that this version lacks leaves its
role out.
"""

from collections.abc import Iterator
from typing import Any

from zeromon.ring.codes import Role
from zeromon.ring.masking import MASK, is_secret_name, mask_words
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


def zero_claims(engine: Any) -> Claims:
    """Yields (role, tensors) of *engine* at any ZeRO stage."""
    optimizer = engine.optimizer
    params = list(engine.module.parameters())
    yield from _swapped_claims(optimizer, params)
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
    for param in params:
        yield Role.SHARDED_PARAM, getattr(param, "ds_tensor", None)
        yield Role.SECONDARY_PARAM, getattr(param, "ds_secondary_tensor", None)
        yield Role.UNSHARDED_PARAM, param.data
        yield Role.UNSHARDED_GRAD, param.grad
        yield Role.UNSHARDED_GRAD, getattr(param, "grad_accum", None)
    yield Role.BUFFER, list(engine.module.buffers())


def _swapped_claims(optimizer: Any, params: list[Any]) -> Claims:
    """Yields swap buffers first, because a parameter that was read in is a view of one."""
    swapper = next((s for s in (getattr(p, "nvme_swapper", None) for p in params) if s), None)
    if swapper is not None:
        yield Role.SWAP_BUFFER, getattr(swapper, "buffers", None)
        yield Role.SWAP_BUFFER, getattr(swapper, "partitioned_swap_buffer", None)
        numel = sum(
            swapper.param_id_to_numel.get(number, 0) for number in getattr(swapper, "id_to_path", ())
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
        # The first tensor of the swapper's list is the master weight itself
        yield Role.OPTIMIZER_STATE, OnDisk(size * (info.num_tensors() - 1))
        lengths = (gradient.length for gradient in info.swapped_gradients.values())
        yield Role.SHARDED_GRAD, OnDisk(sum(lengths) * info.dtype().itemsize)
        yield Role.SHARDED_GRAD, list(info.unswapped_gradients.values())


# ---- settings of a DeepSpeed engine -------------------------------------------------------------

_MAX_SETTINGS = 96
_SHOWN = (
    "stage", "overlap_comm", "reduce_scatter", "contiguous_gradients", "reduce_bucket_size",
    "allgather_bucket_size", "sub_group_size", "round_robin_gradients",
    "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
)  # fmt: skip
_SHOWN_AT_3 = (
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
)  # fmt: skip
_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

Row = tuple[str, str, str]
"""Name as in the JSON file, effective value, written value ("" where the user left it out)."""


def engine_settings(engine: Any) -> list[Row]:
    """Returns the settings of *engine* that matter, then all others that the user wrote."""
    raw = getattr(engine._config, "_param_dict", None)
    user_settings = dict(tree_leaves(raw)) if isinstance(raw, dict) else {}
    rows: dict[str, Row] = {}
    for name, value in effective_settings(engine):
        rows[name] = (name, setting_text(value), setting_text(user_settings.pop(name, "")))
    for name, value in user_settings.items():  # what DeepSpeed does not know may be of other tools
        setting = setting_text(MASK if is_secret_name(name) else value)
        rows[name] = (name, setting, setting)
    return list(rows.values())[:_MAX_SETTINGS]


def effective_settings(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, effective value)."""
    config = engine._config
    zero = config.zero_config
    dump = zero.model_dump(by_alias=True)
    names = _SHOWN + (_SHOWN_AT_3 if int(zero.stage) == 3 else ())
    for name in names:
        if name in dump:
            yield f"zero_optimization.{name}", dump[name]
    for section in ("offload_optimizer", "offload_param"):
        yield from tree_leaves(dump.get(section) or {}, f"zero_optimization.{section}.")
    for name in _BATCH:
        yield name, getattr(engine, name)()
    yield "bf16.enabled", engine.bfloat16_enabled()
    yield "fp16.enabled", engine.fp16_enabled()
    fp16_config = getattr(config, "float16_config", None)
    # DeepSpeed takes a loss scale of 0 for a dynamic one; a fixed scale ignores these settings
    if engine.fp16_enabled() and getattr(fp16_config, "loss_scale", None) == 0:
        for name in _SCALE:
            yield f"fp16.{name}", getattr(fp16_config, name)
    yield "gradient_clipping", engine.gradient_clipping()
    yield "communication_data_type", engine.communication_data_type
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    yield "optimizer.type", type(inner).__name__


def tree_leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (keys joined by dots, value) of the leaves of nested dicts."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from tree_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def setting_text(value: Any) -> str:
    """Returns *value* as JSON would write it, at most 120 characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if hasattr(value, "value"):  # an enumeration
        value = value.value
    # Python reads 5e8 in a JSON file as a float, and writes it as 500000000.0
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e6:
        value = int(value)
    return mask_words([str(value).removeprefix("torch.")])[0][:120]
