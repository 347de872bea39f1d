"""All-gathers of parameters that cross nodes: evidence of FSDP's and of DeepSpeed's rule. Pure."""

from typing import NamedTuple

from zeromon.diagnosis.rules.common import LEAST_SHARE, Gain, exposed, share_of_step
from zeromon.ring.dimensions import MODEL_PARALLEL, dim_of
from zeromon.snapshot import RankSnapshot
from zeromon.units import human_ratio, human_seconds

ACROSS_NODES = Gain(0.3, 0.9)
"""Shares of the exposed time of gathers across nodes. An estimate, not measured: what remains is the
gather within a node."""


class FarGathers(NamedTuple):
    """The gathers of a rank that cross nodes."""

    nodes: int
    local_ranks: int
    """Ranks a node."""
    seconds: float
    """Exposed, a step."""
    share: float
    """The same as a share of the step."""
    cause: str = "every all-gather crosses the network between the nodes"

    @property
    def text(self) -> str:
        """The evidence of a finding."""
        return (
            f"gathering parameters from {self.nodes} nodes waits {human_seconds(self.seconds)} a step "
            f"({human_ratio(self.share)})"
        )


def far_gathers(rank: RankSnapshot) -> FarGathers | None:
    """The gathers of *rank* that cross nodes; None where they cost little."""
    far = [
        row
        for row in rank.traffic
        if row.op == "all_gather" and row.nodes > 1 and dim_of(row.dim) not in MODEL_PARALLEL
    ]
    nodes = max((row.nodes for row in far), default=0)
    seconds = exposed(far)
    share = share_of_step(rank, seconds)
    if nodes < 2 or share < 2 * LEAST_SHARE:
        return None
    return FarGathers(nodes, max(1, rank.world_size // nodes), seconds, share)
