"""A stand-in of W&B."""

from __future__ import annotations

from typing import Any


class Run:
    """A run that keeps nothing."""

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        """Does nothing."""
