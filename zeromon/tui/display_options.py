"""How the user wants values to be shown. Pure."""

import math
from dataclasses import dataclass

WHOLE_RUN = -1
WINDOWS = (0, 60, 120, 250, 500, WHOLE_RUN)
"""Numbers of steps that charts show; 0: as many as fit, WHOLE: all steps of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayOptions:
    """Everything that keys and options change about how a snapshot is drawn."""

    shares: bool = False
    """Shares of a step and of the capacity instead of time and bytes."""
    window: int = 0
    letters: bool = False
    """No colour: letters distinguish the parts."""
    tokens_per_step: int = 0
    """Tokens per step of all ranks together; 0: unknown."""
    peak_flops: float = 0.0
    """Dense peak of one device in the training data type, FLOP/s; 0: unknown."""


def nice_ceiling(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 5, 8, 10, ... from *value* on: the axis seldom changes."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(value))
    steps = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 10.0)
    return next((m * magnitude for m in steps if m * magnitude >= value * (1 - 1e-9)), value)


def format_three_digits(value: float) -> str:
    """*value* with three digits, or with all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
