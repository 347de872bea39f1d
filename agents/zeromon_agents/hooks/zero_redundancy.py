"""``ZeroRedundancyOptimizer``: DDP whose optimizer state is sharded. It needs no hooks of its own."""

from typing import Any

from zeromon.ring.strategy import ZERO_REDUNDANCY
from zeromon_agents.hooks.backend import Backend


class ZeroRedundancy(Backend):
    """Recognizes the optimizer by its type."""

    def rank_metadata(self, optimizers: list[Any]) -> dict[str, Any]:
        """Returns the strategy where the first optimizer is a ``ZeroRedundancyOptimizer``."""
        first = type(optimizers[0]).__name__ if optimizers else ""
        return ZERO_REDUNDANCY.metadata() if first == "ZeroRedundancyOptimizer" else {}
