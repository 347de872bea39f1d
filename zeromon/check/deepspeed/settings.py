"""Settings of a DeepSpeed configuration that many checks need."""

from collections.abc import Mapping

from zeromon.check.problem import AUTO, Config, is_on, whole

ZERO = "zero_optimization"


def stage_of(config: Config) -> int | None:
    """Returns the ZeRO stage, 0 by default; None for "auto" and for invalid values."""
    part = config.get(ZERO)
    if isinstance(part, bool):
        return int(part)
    value = config.get(ZERO, "stage", default=0)
    stage = int(value) if isinstance(value, bool) else whole(value)
    return stage if stage in (0, 1, 2, 3) else None


def precision_of(config: Config, name: str) -> bool | None:
    """Returns whether *name*, bf16 or fp16, is enabled; None for "auto"."""
    part = config.get(name)
    if name == "bf16" and part is None:
        part = config.get("bfloat16")
    if part is True or part is False or part is None:
        return bool(part)
    value = part.get("enabled", False) if isinstance(part, Mapping) else False
    return None if value == AUTO else bool(is_on(value))
