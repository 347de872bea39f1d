"""Parses numbers and switches of DeepSpeed and accelerate configurations, also from text."""

from typing import Any

AUTO = "auto"
"""A value that the framework fills in; also stands for a value that a script computes."""


def number(value: Any) -> float | None:
    """Returns a number or the number in a text; None for "auto" and anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        parsed = float(value)
    except (ValueError, OverflowError):
        return None
    return parsed if -1e18 < parsed < 1e18 else None


def whole(value: Any) -> int | None:
    """Returns a whole number, or a text of one, as an int; None for anything else."""
    parsed = number(value)
    return int(parsed) if parsed is not None and parsed == int(parsed) else None


def is_on(value: Any) -> bool | None:
    """Returns a switch as DeepSpeed and accelerate read it; None for "auto" and anything else."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return bool(value) if isinstance(value, (bool, int)) else None
