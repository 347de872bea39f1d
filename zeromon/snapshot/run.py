"""One run at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from zeromon.ring.codes import TextEnum
from zeromon.snapshot.communication import Hang, Ras, Straggler
from zeromon.snapshot.finding import Finding, Trial
from zeromon.snapshot.host import CpuUser, Energy
from zeromon.snapshot.ledger import LedgerRow
from zeromon.snapshot.rank import RankSnapshot
from zeromon.snapshot.step import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """One run on this node, now."""

    run: str
    command: tuple[str, ...]
    node: str
    started_wall: float
    """Seconds since the epoch."""
    taken_wall: float
    taken_ns: int
    """CLOCK_MONOTONIC of the moment that *ranks* describe."""
    ended: bool
    ranks: tuple[RankSnapshot, ...]
    findings: tuple[Finding, ...]
    note: str = ""
    stragglers: tuple[Straggler, ...] = ()
    hangs: tuple[Hang, ...] = ()
    """Collectives that do not end, the oldest first."""
    ras: Ras | None = None
    """The answer of NCCL's RAS on the run, on the node that leads; None without a hang of NCCL."""
    capture: Capture | None = None
    """The last trace that was asked for."""
    trials: tuple[Trial, ...] = ()
    """Changes that were tried in the live ranks, the newest last."""
    history_note: str = ""
    """Why no history is written any more, or was not for a while; "" for a whole one."""
    history_until: float = 0.0
    """When that began, seconds since the epoch."""
    history_step: int = 0
    """The last step before it."""
    unfinished: bool = False
    """True for the last snapshot of a record that has no end and that nobody writes any more."""
    alias: str = ""
    """The name of the run on this node before it knew of the others."""
    nodes: tuple[NodeView, ...] = ()
    """All nodes of a run that spreads over several, the head first."""
    away: tuple[RemoteRank, ...] = ()
    """Ranks of other nodes that failed, or that a hang is about."""
    nodes_note: str = ""
    """Why ranks of other nodes are not seen, "" where they are."""

    attempts: tuple[Attempt, ...] = ()
    """The other attempts and jobs, in order; those after this one ended before a rank reported."""
    starting: tuple[RankProcess, ...] = ()
    """The processes of ranks that have not reported yet."""
    restarting: int = 0
    """The number of the attempt that the launcher starts, while no rank of it has reported; 0: none."""
    job: str = ""
    """The name, or a scheduler's id, that it shares with the other runs of its job."""
    planned_steps: int = 0
    """How many steps it will take, by ``zeromon run --steps``; 0 where that was not said."""
    revision: str = ""
    """The git commit of the script, ``-dirty`` with changes; "" where unknown."""
    driver: str = ""
    """The version of the devices' driver on this node; "" where unknown."""
    cpu_users: tuple[CpuUser, ...] = ()
    """The processes of this node that use most CPU time, while a rank lacks CPUs."""
    unread: tuple[int, ...] = ()
    """Ranks of this node whose records cannot be read, and of which nothing else is known."""
    energy: Energy | None = None
    """Energy that this node has used; None where it is not known."""
    attempt: int = 1
    """The number of that of :attr:`ranks`, as the launcher counts."""

    @property
    def last_step(self) -> int:
        """The newest step that a rank has ended; 0 before the first."""
        return max((rank.steps.last_step for rank in self.ranks), default=0)

    @property
    def last_attempt(self) -> int:
        """The number of the newest attempt, whether its ranks have reported or not."""
        failed = (attempt.number for attempt in self.attempts if not attempt.finished)
        return max(self.attempt, self.restarting, *failed)

    @property
    def detached(self) -> bool:
        """True if the agent was removed from all ranks that live, or of an ended run from all."""
        ranks = [rank for rank in self.ranks if rank.status.alive] or self.ranks
        return bool(ranks) and all(rank.status.detached for rank in ranks)

    def node_of(self, rank: int) -> str:
        """The node of a rank of another node; "" for one of this node, or where it is not known."""
        remote_node = next((node for node in self.nodes if node.has(rank)), None)
        return remote_node.node if remote_node is not None and not remote_node.here else ""

    fleet: Fleet | None = None
    """The whole, where *ranks* are only a part of it."""
    origin: str = ""
    """The Prometheus that it was read from, where a step stands for those of a while; else ""."""
    every_seconds: float = 1.0
    """How often its source learns something new."""


# ---- earlier attempts of a run whose launcher started its ranks again, and its earlier jobs -----


class DeathRole(TextEnum):
    """The part of a failed rank in the end of the run."""

    CULPRIT = "culprit"
    """It failed by itself."""
    VICTIM = "victim"
    """It ended because another rank had failed."""
    STOPPED = "stopped"
    """A person or a scheduler stopped the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a rank of an earlier attempt failed."""

    rank: int
    ended: str
    exception: str
    role: DeathRole


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A process of a rank that has not reported yet."""

    pid: int
    rank: int | None
    """By its launcher; None where that gives no number."""
    attempt: int
    at: str = ""
    """``train.py:21 in main``: where its Python stands; "" where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """All ranks from one start of the launcher to the next."""

    number: int
    """1: the first."""
    started_wall: float
    """Seconds since the epoch, as is the next."""
    ended_wall: float
    steps: int
    """Steps that ended in it; 0 also where no rank reported."""
    resumed_step: int | None
    """Steps that its optimizers had taken when it began; None where they do not count them."""
    lost_steps: int | None
    """Steps that the next attempt takes again; None where unknown."""
    finished: bool = False
    """No rank failed: the next is another job of the same program, and no restart."""
    deaths: tuple[Death, ...]
    """The culprits first."""
    ledger: tuple[LedgerRow, ...] = ()
    """The seconds of all its ranks, from the attempt before to the next one."""


# ---- several nodes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node of a run, as another sees it."""

    node: str
    address: str
    """The address of its collector, ``host:port``; "" where unknown."""
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
        """Returns True if *rank* is one of its own; launchers number them one after another."""
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
    """The address of its collector, as Prometheus scrapes it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The note and the tags that the user wrote about a run."""

    note: str = ""
    tags: tuple[str, ...] = ()
