"""One run at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from zeromon.snapshot.attempt import Attempt, RankProcess
from zeromon.snapshot.capture import Capture
from zeromon.snapshot.cluster import Fleet, NodeView, RemoteRank
from zeromon.snapshot.communication import Hang, Straggler
from zeromon.snapshot.finding import Finding
from zeromon.snapshot.host import CpuUser, Energy
from zeromon.snapshot.nccl import Ras
from zeromon.snapshot.rank import RankSnapshot
from zeromon.snapshot.trial import Trial


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
    """What NCCL's RAS says of it, on the node that leads; None without a hang of NCCL."""
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
    """What this node called the run before it had heard of the others."""
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
    """What it has in common with the other runs of its job: a name, or a scheduler's id."""
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
    """What this node has used; None where it is not known."""
    attempt: int = 1
    """The number of that of :attr:`ranks`, as the launcher counts."""

    @property
    def last_attempt(self) -> int:
        """The number of the newest attempt, whether its ranks have reported or not."""
        failed = (one.number for one in self.attempts if not one.finished)
        return max(self.attempt, self.restarting, *failed)

    @property
    def detached(self) -> bool:
        """Whether the agent was removed from all ranks that live, or of an ended run from all."""
        ranks = [rank for rank in self.ranks if rank.alive] or self.ranks
        return bool(ranks) and all(rank.detached for rank in ranks)

    def node_of(self, rank: int) -> str:
        """The node of a rank of another node; "" for one of this node, or where it is not known."""
        found = next((node for node in self.nodes if node.has(rank)), None)
        return found.node if found is not None and not found.here else ""

    fleet: Fleet | None = None
    """The whole, where *ranks* are only a part of it."""
    origin: str = ""
    """The Prometheus that it was read from, where a step stands for those of a while; else ""."""
    every_seconds: float = 1.0
    """How often its source learns something new."""
