"""DeepSpeed engines and their settings."""

from __future__ import annotations

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
    """None in a record of an older version."""
    dropped: bool = False
    """The script has let go of it: its model and settings are no longer those of the rank."""

    @property
    def sharding_strategy(self) -> Strategy:
        """How the engine shards its model; by the label where no fields are known."""
        return self.strategy_fields or Strategy.parse(self.strategy)
