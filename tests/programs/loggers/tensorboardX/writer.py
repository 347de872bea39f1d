"""A stand-in of tensorboardX."""

from __future__ import annotations

from typing import Any


class SummaryWriter:
    """A writer that writes nothing."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        """Does nothing."""
