"""DeepSpeed engines and their settings."""

from dataclasses import dataclass

from zeromon.ring.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a DeepSpeed configuration."""

    engine: int
    name: str
    effective: str
    written: str
    """What the user wrote; "" where the default applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One DeepSpeed engine of a rank."""

    engine: int
    strategy: str
    steps: int
    skipped: int
    collectives: int
    nbytes: int
    exposed_seconds: float
    loss_scale: float | None
    hysteresis: int
    """Overflows until the loss scale is lowered; -1 without it."""
    grad_norm: float | None
    """None where the host does not know it, and where it is not finite."""
    nonfinite: int
    """Steps whose gradient norm was infinite or NaN."""
    strategy_fields: Strategy | None = None
    dropped: bool = False
    """The script has let go of it: its model and settings are no longer those of the rank."""
