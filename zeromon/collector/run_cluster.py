"""One run's exchange with the collectors of its other nodes: name, reports, replies."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeromon.collector.cluster import Leader, NodeInfo, PeerRank
from zeromon.collector.cluster_client import ClusterSync, NodeList
from zeromon.diagnosis.arrivals import ArrivalSkew
from zeromon.diagnosis.hangs import hangs_of, since_difference
from zeromon.fold.group_progress import call_histories
from zeromon.fold.state import RankState
from zeromon.readout.text import doing
from zeromon.snapshot import CallHistory, Hang, NodeView, RankSnapshot, RemoteRank
from zeromon.units import printable

NOTE, _MOST_NOTE = "nodes.note", 400
"""What the agents' rendezvous says of nodes that are missing."""
_NAMING_SECONDS = 15.0
"""Timeout of the agents' rendezvous, after which the run is named without the other nodes."""


class RunCluster:
    """The connection of one run to its other nodes. On a single node it does nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sync: ClusterSync | None = None
        self._peers: list[PeerRank] = []
        """The local ranks of the last snapshot, as reported to other nodes."""
        self._list = NodeList(folder)
        self._learned: list[NodeInfo] = []
        self._first_ring = 0.0

    def can_name(self, states: Sequence[RankState]) -> bool:
        """Whether the run's name is known: nodes other than the first use the name of the first."""
        if not states:
            return False
        self._first_ring = self._first_ring or time.monotonic()
        if any(state.rank == 0 for state in states) or self._list.read():
            return True
        single_node = any(_is_single_node(state.meta) for state in states)
        return single_node or time.monotonic() - self._first_ring > _NAMING_SECONDS

    def connect(self, run: str, ranks: Iterable[int], lead: Callable[[str], Leader]) -> None:
        """Starts to exchange reports once the agents have listed the other nodes.

        *lead* makes the leader of a run; it is called on the node of rank 0 only.
        """
        nodes = self._list.read()
        if self._sync is not None:
            if nodes is not self._learned:
                self._sync.learn(nodes)
                self._learned = nodes
            return
        local = set(ranks)
        own = next((node for node in nodes if node.first_rank in local), None)
        if own is None or len(nodes) < 2:
            return
        leader = lead(run) if own is nodes[0] else None
        self._sync = ClusterSync(nodes[0].run or run, own, nodes, leader)

    def exchange(self, skew: ArrivalSkew) -> None:
        """Sends the arrivals that *skew* could not match on this node; records the leader's matches."""
        if self._sync is None:
            return
        self._sync.enqueue(skew.outgoing, self._peers)
        for match in self._sync.matches():
            skew.book(match)
        skew.joined = self._sync.is_heard

    def report(self, ranks: Iterable[RankSnapshot]) -> None:
        """Keeps *ranks* for the next report to the leader."""
        if self._sync is not None:
            self._peers = [as_peer_rank(rank, self._sync.own.node) for rank in ranks]

    def close(self) -> None:
        """Ends the exchange."""
        if self._sync is not None:
            self._sync.close()

    @property
    def is_connected(self) -> bool:
        """Whether the run has several nodes, and they are known."""
        return self._sync is not None

    @property
    def is_heard(self) -> bool:
        """Whether the last reply of the leader is recent."""
        return self._sync is not None and self._sync.is_heard

    def find_hangs(
        self, states: Sequence[RankState], ranks: Sequence[RankSnapshot], now_ns: int
    ) -> tuple[Hang, ...]:
        """The hangs by the ranks of all nodes; what members called differently, by those of this one."""

        def recent(group: str) -> list[CallHistory]:
            return [history for state in states for history in call_histories(state, group)]

        if self._sync is None or not self._sync.is_heard:
            return hangs_of(ranks, now_ns, recent)
        return tuple(since_difference(hang, recent) for hang in self._sync.hangs)

    @property
    def away(self) -> tuple[RemoteRank, ...]:
        """Ranks of other nodes that failed or take part in a hang; () while the leader is silent."""
        return self._sync.away if self._sync is not None and self._sync.is_heard else ()

    @property
    def note(self) -> str:
        """Why ranks of other nodes are unknown; "" where they are known."""
        if self._sync is not None and self._sync.note:
            return self._sync.note
        with suppress(OSError):
            return printable((self._folder / NOTE).read_text(errors="replace")[:_MOST_NOTE])
        return ""

    def nodes(self) -> tuple[NodeView, ...]:
        """All nodes of the run, the leader first; () on a single node."""
        return self._sync.nodes() if self._sync is not None else ()

    def reachable_nodes(self) -> list[NodeInfo]:
        """The nodes whose collectors can be reached from here, this one included."""
        if self._sync is None:
            return []
        own = self._sync.own.first_rank
        # another node's loopback address would lead to this node's collector
        return [n for n in self._sync.cards() if n.first_rank == own or not n.is_local]

    def clock_error_seconds(self) -> float:
        """The bound of the error between this node's clock and the leader's, seconds."""
        offset = self._sync.offset() if self._sync is not None else None
        return offset.error_at(time.monotonic_ns()) / 1e9 if offset else 0.0


def as_peer_rank(rank: RankSnapshot, node: str) -> PeerRank:
    """Returns the fields of *rank*, a rank of *node*, that other nodes need."""
    return PeerRank(
        rank=rank.rank,
        node=node,
        alive=rank.alive,
        failed=rank.failed and not rank.stopped,
        ended=rank.ended,
        step_seconds=rank.step_seconds,
        doing=doing(rank),
        in_flight=rank.in_flight,
        groups=rank.groups,
        pause=rank.pause,
        stopped=rank.stopped,
        last_event_ns=rank.last_event_ns,
    )


def _is_single_node(meta: dict[str, Any]) -> bool:
    """Whether all ranks of the job run on the node of the rank with this metadata."""
    local = meta.get("local_world_size")
    return isinstance(local, int) and 0 < meta.get("world_size", 1) <= local
