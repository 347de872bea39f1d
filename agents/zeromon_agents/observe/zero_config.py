"""Settings of a DeepSpeed engine: the effective value of each, beside the value that the user wrote."""

from collections.abc import Iterator
from typing import Any

from zeromon.ring.masking import MASK, is_secret, masked

_MOST = 96
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


def settings(engine: Any) -> list[Row]:
    """Returns the settings of *engine* that matter, then all others that the user wrote."""
    raw = getattr(engine._config, "_param_dict", None)
    written = dict(leaves(raw)) if isinstance(raw, dict) else {}
    rows: dict[str, Row] = {}
    for name, value in effective(engine):
        rows[name] = (name, text(value), text(written.pop(name, "")))
    for name, value in written.items():  # what DeepSpeed does not know may be of other tools
        shown = text(MASK if is_secret(name) else value)
        rows[name] = (name, shown, shown)
    return list(rows.values())[:_MOST]


def effective(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, effective value)."""
    config = engine._config
    zero = config.zero_config
    dump = zero.model_dump(by_alias=True)
    shown = _SHOWN + (_SHOWN_AT_3 if int(zero.stage) == 3 else ())
    for name in shown:
        if name in dump:
            yield f"zero_optimization.{name}", dump[name]
    for part in ("offload_optimizer", "offload_param"):
        yield from leaves(dump.get(part) or {}, f"zero_optimization.{part}.")
    for name in _BATCH:
        yield name, getattr(engine, name)()
    yield "bf16.enabled", engine.bfloat16_enabled()
    yield "fp16.enabled", engine.fp16_enabled()
    half = getattr(config, "float16_config", None)
    if engine.fp16_enabled() and getattr(half, "loss_scale", None) == 0:
        for name in _SCALE:
            yield f"fp16.{name}", getattr(half, name)
    yield "gradient_clipping", engine.gradient_clipping()
    yield "communication_data_type", engine.communication_data_type
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    yield "optimizer.type", type(inner).__name__


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (keys joined by dots, value) of the leaves of nested dicts."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def text(value: Any) -> str:
    """Returns *value* as JSON would write it, at most 120 characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if hasattr(value, "value"):  # an enumeration
        value = value.value
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e6:
        value = int(value)
    return masked([str(value).removeprefix("torch.")])[0][:120]
