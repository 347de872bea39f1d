"""Which rank this process is, from its process group or from the launcher's environment variables."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from zeromon_agents.runtime.rendezvous import is_first_on_node

_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE = (
    "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)  # fmt: skip


class RankInfo:
    """Rank and world size of this process, and its rank among the ranks of its node."""

    def __init__(self) -> None:
        distributed = torch.distributed
        ready = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if ready else int(os.environ.get("RANK", 0))
        world = distributed.get_world_size() if ready else int(os.environ.get("WORLD_SIZE", 1))
        self.world_size = world
        local_rank = first_number(_LOCAL_RANK, -1)
        self.local_rank = self.rank if local_rank < 0 else local_rank
        self.knows_local_rank = local_rank >= 0
        self.local_world_size = first_number(_LOCAL_SIZE, 0)
        """0 where the launcher does not set it."""

    def is_node_leader(self, run_dir: Path) -> bool:
        """Whether this rank introduces its node's collector to the other nodes."""
        return self.local_rank == 0 if self.knows_local_rank else is_first_on_node(run_dir)


def first_number(names: Sequence[str], otherwise: int) -> int:
    """Returns the first of these environment variables that is a number, or *otherwise*."""
    values = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in values if text.isdigit()), otherwise)
