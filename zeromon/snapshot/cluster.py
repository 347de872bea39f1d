"""Several nodes: nodes, ranks of other nodes, and runs too large to show rank by rank."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node of a run, as another sees it."""

    node: str
    address: str
    """Of its collector, ``host:port``; "" where unknown."""
    first_rank: int
    ranks: int
    here: bool = False
    heard_seconds: float | None = None
    """Since its collector was last heard; None before the first time."""
    silent: bool = False
    """For so long that it is taken for gone."""
    round_trip_seconds: float | None = None
    """To the head and back, the shortest of the last exchanges; None for the head."""
    clock_offset_seconds: float | None = None
    """Its monotonic clock less that of the head."""
    clock_error_seconds: float | None = None

    def has(self, rank: int) -> bool:
        """Whether *rank* is one of its own; launchers number them one after another."""
        return self.first_rank <= rank < self.first_rank + self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRank:
    """A rank of another node."""

    rank: int
    node: str
    alive: bool
    failed: bool
    ended: str
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How a collector does."""

    runs: int
    """Live ones that it follows."""
    ticks: int
    """How often it has read the rings."""
    busy_seconds: float
    """Time that this took."""
    last_tick_wall: float
    """When it did so last, seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over all ranks of a run: some of its quantiles, to half a percent."""

    least: float
    p5: float
    median: float
    p95: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNode:
    """One node of a large run; figures are those of its worst rank, None where unknown."""

    node: str
    address: str
    """Of its collector, as Prometheus scrapes it."""
    ranks: int
    up: int
    failed: int
    silent_seconds: float = 0.0
    """How long nothing has been heard of it; 0 while it answers."""
    step_seconds: float | None = None
    exposed_ratio: float | None = None
    late_seconds: float | None = None
    wait_seconds: float | None = None
    memory_bytes: float | None = None
    """Reserved on the device, or resident on the host where there is none."""
    risk_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All of a run that is too large to be shown rank by rank: its snapshot has those that matter."""

    ranks: int
    up: int
    failed: int
    silent: int
    """Ranks of nodes that nothing has been heard of for some time."""
    waiting: int
    """Ranks in a collective that hangs."""
    nodes: tuple[FleetNode, ...]
    spreads: dict[str, Spread]
    """By the names of :class:`FleetNode`, and ``overlap_ratio`` and ``headroom_bytes``."""
