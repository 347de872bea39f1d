"""Checks of who reads a file: DeepSpeed reads Hjson; transformers and accelerate JSON with "auto"."""

from collections.abc import Iterator, Mapping
from typing import Any

from zeromon.check.problem import (
    AUTO,
    Config,
    Machine,
    Path,
    Problem,
    is_on,
    join_names,
    parse_whole,
)

ZERO = "zero_optimization"


def stage_of(config: Config) -> int | None:
    """Returns the ZeRO stage, 0 by default; None for "auto" and for invalid values."""
    section = config.get(ZERO)
    if isinstance(section, bool):
        return int(section)
    value = config.get(ZERO, "stage", default=0)
    stage = int(value) if isinstance(value, bool) else parse_whole(value)
    return stage if stage in (0, 1, 2, 3) else None


def precision_of(config: Config, name: str) -> bool | None:
    """Returns whether *name*, bf16 or fp16, is enabled; None for "auto"."""
    section = config.get(name)
    if name == "bf16" and section is None:
        section = config.get("bfloat16")
    if section is True or section is False or section is None:
        return bool(section)
    value = section.get("enabled", False) if isinstance(section, Mapping) else False
    return None if value == AUTO else bool(is_on(value))


_FILLED = frozenset((
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "gradient_clipping", "fp16.enabled", "bf16.enabled", f"{ZERO}.stage",
    *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
    *(f"scheduler.params.{name}" for name in (
        "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")),
    *(f"{ZERO}.{name}" for name in (
        "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_gather_16bit_weights_on_model_save", "offload_optimizer.device",
        "offload_optimizer.nvme_path", "offload_param.device", "offload_param.nvme_path")),
))  # fmt: skip
"""Settings whose "auto" is replaced, by HfTrainerDeepSpeedConfig or DeepSpeedPlugin."""

_HJSON_FIX = "remove comments and trailing commas, and quote keys with double quotes"


def not_json(config: Config, reader: str) -> tuple[str, str]:
    """Returns message and fix for a file of Hjson that *reader* reads as JSON."""
    refused = config.refused
    position = f"line {refused.line}: {refused.message}" if refused is not None else ""
    return f"{reader} reads {config.file} as JSON, and it is Hjson ({position})", _HJSON_FIX


def hjson_file(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields a file of Hjson: an error where "auto" shows that transformers or accelerate reads it."""
    if config.refused is None:
        return
    position = config.refused.line, config.refused.column
    message = (
        f"this is Hjson, not JSON ({config.refused.message}): DeepSpeed reads it, "
        "transformers and accelerate refuse it"
    )
    severity = "error" if has_auto(config) else "info"
    yield Problem(config.file, *position, "ZM101", severity, message, _HJSON_FIX)


def has_auto(config: Config) -> bool:
    """Returns whether a value of *config* is "auto", which transformers or accelerate fills in."""
    return any(True for _ in _auto_paths(config.data, ()))


def _auto_paths(data: Mapping[str, Any], path: Path) -> Iterator[Path]:
    for name, value in data.items():
        key_path = (*path, str(name))
        if isinstance(value, Mapping):
            yield from _auto_paths(value, key_path)
        elif value == AUTO:
            yield key_path


def unfilled_autos(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields settings whose "auto" nothing replaces; in scripts it stands for any computed value."""
    paths = [auto for auto in _auto_paths(config.data, ()) if ".".join(auto) not in _FILLED]
    if config.dialect == "python" or config.has("autotuning") or not paths:
        return
    names = join_names(".".join(auto) for auto in paths)
    message = (
        f'nothing replaces "{AUTO}" in {names}: accelerate and Trainer refuse that, and DeepSpeed '
        "alone takes its default"
    )
    yield config.problem("ZM103", "error", paths[0], message, "give a number, or remove it")
