"""Memory of a rank by role over the moments of a record. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from zeromon.snapshot import RankSnapshot, RunSnapshot

EVERYTHING_ELSE = "everything else"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBands:
    """Bytes of each role at each moment; the bands of a moment sum to what the rank holds there."""

    rank: int
    place: str
    """``device``: of what the caching allocator has reserved; ``host``: of the resident set."""
    steps: tuple[int, ...]
    bands: dict[str, tuple[int, ...]]
    """Role -> bytes at each of *steps*; last :data:`EVERYTHING_ELSE`, which no role accounts for."""


def role_bands(moments: Iterable[RunSnapshot], number: int) -> RoleBands | None:
    """The roles of rank *number* at *moments*, in their order; None where none has a memory census."""
    found = {
        rank.step: rank
        for run in moments
        for rank in run.ranks
        if rank.rank == number and rank.roles and _held(rank) >= 0
    }
    if not found:
        return None
    on_device = any(rank.memory is not None for rank in found.values())
    ranks = [rank for rank in found.values() if (rank.memory is not None) == on_device]
    by_role = [_by_role(rank) for rank in ranks]
    names = dict.fromkeys(name for row in by_role for name, nbytes in row.items() if nbytes)
    bands = {name: tuple(row.get(name, 0) for row in by_role) for name in names}
    rest = (_held(rank) - sum(row.values()) for rank, row in zip(ranks, by_role, strict=True))
    return RoleBands(
        rank=number,
        place="device" if on_device else "host",
        steps=tuple(rank.step for rank in ranks),
        bands=bands | {EVERYTHING_ELSE: tuple(max(0, nbytes) for nbytes in rest)},
    )


def _held(rank: RankSnapshot) -> int:
    """What the rank holds where it allocates; -1 where that is not known."""
    return rank.rss_bytes if rank.memory is None else rank.memory.reserved_bytes


def _by_role(rank: RankSnapshot) -> dict[str, int]:
    on_device = rank.memory is not None
    return {
        row.role.replace("_", " "): row.device_bytes if on_device else row.host_bytes
        for row in rank.roles
    }
