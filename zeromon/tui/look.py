"""How the user wants things shown, and numbers in that way. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeromon.units import human_bytes

WHOLE = -1
WINDOWS = (0, 60, 120, 250, 500, WHOLE)
"""Steps that charts show; 0: as many as fit, two a column; WHOLE: all of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Everything that a key can change about how a picture is drawn."""

    decimal: bool = False
    """GB of 10^9 instead of GiB of 2^30."""
    shares: bool = False
    """Shares of a step and of the capacity instead of time and bytes."""
    window: int = 0
    letters: bool = False
    """No colour: parts are told apart by letters."""
    tokens_per_step: int = 0
    """Of all ranks, as the user says; 0: not said."""
    peak_flops: float = 0.0
    """Of one device, dense, in the type that is trained in; 0: not said."""

    def size(self, nbytes: float | None) -> str:
        """Bytes for people; ``n/a`` for what is not known."""
        if not self.decimal or nbytes is None or nbytes < 0:
            return human_bytes(nbytes)
        for unit in ("B", "kB", "MB", "GB"):
            if nbytes < 1000:
                return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
            nbytes /= 1000
        return f"{nbytes:.1f} TB"

    def scale(self, top_bytes: float) -> tuple[float, str]:
        """What to divide an axis up to *top_bytes* by, and the unit."""
        base, names = (1000, ("B", "kB", "MB", "GB", "TB")) if self.decimal else (
            1024, ("B", "KiB", "MiB", "GiB", "TiB"),
        )  # fmt: skip
        power = 0
        while power < 4 and top_bytes >= base ** (power + 1):
            power += 1
        return float(base**power), names[power]


def nice_ceiling(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 5, 8, 10, ... above *value*: an axis that does not twitch."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(value))
    steps = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 10.0)
    return next((m * magnitude for m in steps if m * magnitude >= value * (1 - 1e-9)), value)


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
