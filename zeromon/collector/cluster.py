"""A run on several nodes: the reports of their collectors, and the leader's conclusions from them.

Once a second, less often with many nodes, the collector of every node sends a report to the *leader*,
the collector of rank 0's node: when its ranks arrived at the collectives that they share with other
nodes, and which ranks are alive. The reply has the rank that arrived last, the hangs, and the silent
nodes. Each exchange also compares the two clocks, as NTP does: with t0 and t3 the times at the node
and t1 and t2 those at the leader, the node's clock is ahead by ((t0 - t1) + (t3 - t2)) / 2, wrong by at
most half of (t3 - t0) - (t2 - t1).

Apart from the leader's lock, this module is pure; :mod:`zeromon.collector.cluster_client` has the
connection. Names in the JSON (card, joints) are those of the first version of the protocol.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import msgspec

from zeromon import __version__
from zeromon.base.units import printable
from zeromon.diagnosis.arrivals import NEVER, MatchedCollective, PartialArrival, matched_collective
from zeromon.diagnosis.hangs import Member, hangs_of
from zeromon.snapshot import Hang
from zeromon.snapshot.levels import NODE_SILENT_SECONDS
from zeromon.snapshot.run import NodeView, RemoteRank

EXCHANGE = 2
"""The layout of reports and replies: every change of their fields gets the next number."""
_MAX_JOINTS_PER_SECOND = 10_000
_MAX_LISTED = 64
"""A reply lists all nodes up to this number; of more nodes, only the silent and the distant ones."""
_MAX_PENDING = 16384
_MAX_REMOTE = 64
_NODES_PER_SECOND = 32
_LONGEST_INTERVAL_SECONDS = 10.0
_OLD_NS = 5_000_000_000
"""A collective that has been in flight for longer is reported to the leader."""
_LAST_TRIPS = 10
_FAR_SECONDS = 0.001
"""With many nodes, replies omit those with a shorter round trip."""
_DRIFT = 50e-6
"""Bound of the drift between two clocks, seconds per second."""
_MAX_AHEAD_NS = 1_000_000_000
"""A report of arrivals that are further in the future comes from a node whose clock is wrong."""


class NodeInfo(msgspec.Struct, frozen=True):
    """A node as its agents announce it."""

    node: str
    address: str
    """Address of its collector, ``host:port``; "" without one."""
    first_rank: int
    ranks: int
    run: str = ""
    """The run's name, set by the leader's node; "" on the other nodes."""
    started: float = 0.0

    @property
    def is_local(self) -> bool:
        """True if its collector listens on loopback only."""
        return self.address.startswith(("127.", "localhost:", "[::1]"))


class PeerRank(Member, frozen=True, kw_only=True):
    """A rank of another node."""

    node: str
    ended: str
    doing: str


class Version(msgspec.Struct, kw_only=True):
    """The version of a message, decoded first: the other fields may have another layout."""

    exchange: int = 0
    """:data:`EXCHANGE` of the sender; 0 before messages had it."""
    zeromon: str = ""


class Sender(Version, kw_only=True):
    """Who sent a report, and in which version."""

    run: str
    card: NodeInfo


def version_mismatch(node: str, version: Version) -> str:
    """Returns why a message of *node* is not read; "" if it has the layout of this version."""
    if version.exchange == EXCHANGE:
        return ""
    theirs = f"zeromon {printable(version.zeromon[:40])}" if version.zeromon else "an older zeromon"
    return (
        f"node {node} runs {theirs} (exchange {version.exchange}), this node zeromon {__version__} "
        f"(exchange {EXCHANGE}): they do not read each other's reports; install one version on all nodes"
    )


class NodeReport(msgspec.Struct):
    """The report of a node to the leader. Times are by the leader's clock."""

    run: str
    card: NodeInfo
    round_trip_ns: int = -1
    """To the leader and back, the shortest of the last exchanges; -1 before the first."""
    known: int = 0
    """How many nodes the sender knows."""
    groups: list[str] = []
    joints: list[tuple[int, PartialArrival]] = []
    """Each with the index of its group in *groups*; its own group is empty."""
    peers: list[PeerRank] = []
    exchange: int = EXCHANGE
    zeromon: str = __version__


def printable_node_info(card: NodeInfo) -> NodeInfo:
    """Returns *card* with control characters replaced, because it comes from another machine."""
    return msgspec.structs.replace(card, node=printable(card.node), address=printable(card.address))


def _printable_peer_rank(peer: PeerRank, node: str) -> PeerRank:
    return msgspec.structs.replace(
        peer, node=node, ended=printable(peer.ended), doing=printable(peer.doing)
    )


class KnownNode(msgspec.Struct, frozen=True):
    """A node, the time since its last report, and its round trip; both in seconds."""

    card: NodeInfo
    heard: float
    round_trip: float = -1.0


class LeaderReply(msgspec.Struct):
    """The leader's reply to a report."""

    received_ns: int
    replied_ns: int
    every_seconds: float
    sample: int = 1
    """Nodes report every *sample*-th collective."""
    nodes: list[KnownNode] = []
    """All nodes; once the sender knows all of many nodes, only the silent and the distant ones."""
    groups: list[str] = []
    matches: list[tuple[int, MatchedCollective]] = []
    hangs: tuple[Hang, ...] = ()
    away: list[RemoteRank] = []
    asked: list[str] = []
    """Ids of the groups whose progress the leader needs."""
    exchange: int = EXCHANGE
    zeromon: str = __version__


class ClockOffset(NamedTuple):
    """How far this node's clock is ahead of the leader's, nanoseconds."""

    value_ns: float
    error_ns: float
    at_ns: int
    """Time of the measurement, by this node's clock."""

    def error_at(self, now_ns: int) -> float:
        """Returns the bound of the error at *now_ns*, which grows as the clocks drift."""
        return self.error_ns + _DRIFT * max(0, now_ns - self.at_ns)


def measure_clock_offset(t0: int, t1: int, t2: int, t3: int) -> ClockOffset:
    """Returns the offset by one exchange; times: sent, received, replied, reply received."""
    return ClockOffset(((t0 - t1) + (t3 - t2)) / 2, max(0, (t3 - t0) - (t2 - t1)) / 2, t3)


_Row = TypeVar("_Row", PartialArrival, MatchedCollective)


class Clock:
    """The offset of this node's clock by the last exchanges; one thread adds them, others copy."""

    def __init__(self) -> None:
        self._offsets: deque[ClockOffset] = deque(maxlen=64)

    def heard(self, t0: int, t1: int, t2: int, t3: int) -> None:
        """Adds an exchange; forgets those that contradict it, because a clock has jumped since."""
        new = measure_clock_offset(t0, t1, t2, t3)
        for old in list(self._offsets):
            if abs(old.value_ns - new.value_ns) > old.error_at(t3) + new.error_ns:
                self._offsets.remove(old)
        self._offsets.append(new)

    def round_trip_ns(self) -> int:
        """Returns the shortest round trip of the last exchanges; -1 before the first."""
        recent_offsets = list(self._offsets)[-_LAST_TRIPS:]
        # Doubled, the default is the -1 that stands for an unknown round trip
        return round(2 * min((offset.error_ns for offset in recent_offsets), default=-0.5))

    def best(self, now_ns: int) -> ClockOffset | None:
        """Returns the offset with the smallest error now; None before the first."""
        return min(list(self._offsets), key=lambda offset: offset.error_at(now_ns), default=None)


def to_leader_clock(joint: PartialArrival, shift: int) -> PartialArrival:
    """Returns *joint* by the leader's clock; *shift* is this node's clock minus the leader's."""
    # NEVER marks an absent time: shifted, it would pass for an arrival
    before_ns = joint.before_ns if joint.before_ns == NEVER else joint.before_ns - shift
    return joint._replace(
        first_ns=joint.first_ns - shift,
        last_ns=joint.last_ns - shift,
        before_ns=before_ns,
        waits_ns=joint.waits_ns - shift,
        others_wait_ns=joint.others_wait_ns - shift,
    )


def peer_rank_updates(
    peers: Iterable[PeerRank], wanted_groups: Iterable[str], now_ns: int, shift: int
) -> list[PeerRank]:
    """Returns *peers* with their old collectives, and their progress in the *wanted_groups* groups.

    Only the first peer lists the members of a group, which may be thousands. *shift* is this
    node's clock minus the leader's.
    """
    wanted_ids = set(wanted_groups)
    named: set[str] = set()
    updates = []
    for peer in peers:
        inside = tuple(
            replace(entry, issued_ns=entry.issued_ns - shift)
            for entry in peer.in_flight
            if entry.group_id in wanted_ids or now_ns - entry.issued_ns > _OLD_NS
        )
        reported_ids = wanted_ids | {entry.group_id for entry in inside}
        groups = []
        for group in peer.groups:
            if group.group_id in reported_ids:
                groups.append(group if group.group_id not in named else replace(group, ranks=()))
                named.add(group.group_id)
        last_event_ns = peer.last_event_ns - shift
        updates.append(
            msgspec.structs.replace(
                peer, in_flight=inside, groups=tuple(groups), last_event_ns=last_event_ns
            )
        )
    return updates


@dataclass(slots=True)
class _Node:
    """The leader's state of one node."""

    card: NodeInfo
    heard_ns: int
    peers: list[PeerRank]
    outbox: deque[MatchedCollective]
    round_trip_ns: int = -1


@dataclass(slots=True)
class _Collective:
    """The arrivals at one collective that nodes have reported."""

    joints: dict[int, PartialArrival]
    here: int
    """Number of members that have arrived."""


def pack_groups(joints: Iterable[_Row]) -> tuple[list[str], list[tuple[int, _Row]]]:
    """Returns the distinct group ids, and each row with the index of its group instead of the id."""
    indexes: dict[str, int] = {}
    rows = [(indexes.setdefault(row.group, len(indexes)), row._replace(group="")) for row in joints]
    return list(indexes), rows


def unpack_groups(groups: Sequence[str], rows: Iterable[tuple[int, _Row]]) -> Iterator[_Row]:
    """Yields rows that :func:`pack_groups` packed; raises :class:`ValueError` for an unknown index."""
    for index, row in rows:
        if not 0 <= index < len(groups):
            raise ValueError(f"no group {index}")
        yield row._replace(group=groups[index])


def report_interval_seconds(nodes: int) -> float:
    """Returns how often so many nodes report, seconds."""
    return min(_LONGEST_INTERVAL_SECONDS, max(1.0, nodes / _NODES_PER_SECOND))


def silence_timeout_seconds(every_seconds: float) -> float:
    """Returns the timeout, seconds, after which a node that reports *every_seconds* counts as silent."""
    return max(NODE_SILENT_SECONDS, 2.5 * every_seconds)


class Leader:
    """The part of the collector of rank 0's node for all nodes of one run. Thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._pending: OrderedDict[tuple[str, int], _Collective] = OrderedDict()
        self._lock = threading.Lock()
        self._sample = 1
        self._joints = 0
        """Arrivals since the rate was last measured."""
        self._hangs: tuple[Hang, ...] = ()
        self._away: list[RemoteRank] = []
        self._all: list[KnownNode] = []
        self._notable: list[KnownNode] = []
        """The nodes that are silent or distant."""
        self._concluded_ns = -(1 << 62)
        self._unread: dict[int, str] = {}
        """Why the reports of a node, by its first rank, are not read."""

    def reads(self, sender: Sender) -> bool:
        """Returns whether the report of *sender* has this version's layout; keeps the reason if not."""
        with self._lock:
            reason = version_mismatch(printable(sender.card.node), sender)
            self._unread.pop(sender.card.first_rank, None)
            if reason:
                self._unread[sender.card.first_rank] = reason
            return not reason

    @property
    def note(self) -> str:
        """Why the reports of a node are not read, and how many more nodes' are not; "" for none."""
        reasons = list(self._unread.values())
        suffix = f"; the same of {len(reasons) - 1} more nodes" if len(reasons) > 1 else ""
        return reasons[0] + suffix if reasons else ""

    def answer(self, report: NodeReport, received_ns: int) -> LeaderReply:
        """Stores a report and returns the reply; *received_ns* is by this node's clock."""
        with self._lock:
            card = printable_node_info(report.card)
            node = self._nodes.get(card.first_rank)
            if node is None:
                node = _Node(card, received_ns, [], deque(maxlen=_MAX_PENDING))
                self._nodes[card.first_rank] = node
            node.card, node.heard_ns = card, received_ns
            node.peers = [_printable_peer_rank(peer, card.node) for peer in report.peers]
            node.round_trip_ns = report.round_trip_ns
            latest_ns = received_ns + _MAX_AHEAD_NS
            for joint in unpack_groups(report.groups, report.joints):
                if joint.last_ns > latest_ns:
                    self._unread[card.first_rank] = (
                        f"node {card.node} reports arrivals of the future: its clock is wrong, and its "
                        "ranks are not matched"
                    )
                else:
                    self._add_arrivals(card.first_rank, joint)
            self._joints += len(report.joints)
            # At most twice a second: with 1,000 nodes every report would search the ranks of all nodes
            if received_ns - self._concluded_ns > 500_000_000:
                self._adapt_sampling_rate(max(0.5, (received_ns - self._concluded_ns) / 1e9))
                self._concluded_ns = received_ns
                self._find_hangs(received_ns)
                self._list_known_nodes(received_ns)
            groups, matches = pack_groups(node.outbox)
            node.outbox.clear()
            return LeaderReply(
                received_ns=received_ns,
                replied_ns=received_ns,
                every_seconds=self._report_interval(),
                sample=self._sample,
                nodes=self._notable if _MAX_LISTED < len(self._nodes) <= report.known else self._all,
                groups=groups,
                matches=matches,
                hangs=self._hangs,
                away=self._away,
                asked=sorted({hang.group_id for hang in self._hangs}),
            )

    def _report_interval(self) -> float:
        return report_interval_seconds(len(self._nodes))

    def _adapt_sampling_rate(self, seconds: float) -> None:
        """Halves the sampled share of collectives above the highest rate; doubles it below a quarter."""
        rate, self._joints = self._joints / seconds, 0
        if rate > _MAX_JOINTS_PER_SECOND:
            self._sample = min(1 << 20, 2 * self._sample)
        elif rate < _MAX_JOINTS_PER_SECOND / 4:
            self._sample = max(1, self._sample // 2)

    def _list_known_nodes(self, now_ns: int) -> None:
        limit = silence_timeout_seconds(self._report_interval())
        self._all = [
            KnownNode(node.card, (now_ns - node.heard_ns) / 1e9, node.round_trip_ns / 1e9)
            for _, node in sorted(self._nodes.items())
        ]
        self._notable = [s for s in self._all if s.heard > limit or s.round_trip > _FAR_SECONDS]

    def _add_arrivals(self, node: int, joint: PartialArrival) -> None:
        """Adds a node's arrivals at a collective; matches it when all members have arrived."""
        key = joint.group, joint.sequence
        inside = self._pending.get(key)
        if inside is None:
            inside = self._pending[key] = _Collective({}, 0)
            # A report that is lost leaves collectives that never have all members: they would pile up
            if len(self._pending) > _MAX_PENDING:
                self._pending.popitem(last=False)
        # A collector that starts again reads its rings anew, and reports the same arrivals twice
        if node not in inside.joints:
            inside.here += joint.here
        inside.joints[node] = joint
        if inside.here >= joint.size:
            self._pending.pop(key, None)
            match = matched_collective(list(inside.joints.values()))
            for member in inside.joints:
                self._nodes[member].outbox.append(match)

    def _find_hangs(self, now_ns: int) -> None:
        """Finds hangs among the ranks of all nodes that are not silent."""
        members: list[PeerRank] = []
        for node in self._nodes.values():
            # The ranks of a silent node look like members that never come, and would be accused
            if (now_ns - node.heard_ns) / 1e9 < silence_timeout_seconds(self._report_interval()):
                members += node.peers
        self._hangs = hangs_of(members, now_ns)
        concerned = {r for hang in self._hangs for r in (*hang.missing[:8], *hang.dead[:8])}
        self._away = [
            RemoteRank(
                rank=p.rank, node=p.node, alive=p.alive, failed=p.failed, ended=p.ended, doing=p.doing
            )
            for p in members
            if p.failed or p.rank in concerned
        ][:_MAX_REMOTE]  # fmt: skip


def make_node_views(
    cards: Iterable[NodeInfo],
    heard: Mapping[int, KnownNode],
    since_seconds: float,
    every_seconds: float,
    own_first_rank: int,
    offset: ClockOffset | None,
    now_ns: int,
) -> tuple[NodeView, ...]:
    """Returns all nodes; *own_first_rank* is the first rank of this one.

    *heard*: first rank -> the leader's reply on that node, received *since_seconds* ago.
    """
    views = []
    for card in cards:
        is_here, listed = card.first_rank == own_first_rank, heard.get(card.first_rank)
        own_offset = offset if is_here else None
        heard_seconds = 0.0 if is_here else None if listed is None else listed.heard + since_seconds
        views.append(
            NodeView(
                node=card.node,
                address=card.address,
                first_rank=card.first_rank,
                ranks=card.ranks,
                here=is_here,
                heard_seconds=heard_seconds,
                silent=heard_seconds is not None
                and heard_seconds > silence_timeout_seconds(every_seconds),
                round_trip_seconds=listed.round_trip if listed and listed.round_trip >= 0 else None,
                clock_offset_seconds=own_offset.value_ns / 1e9 if own_offset else None,
                clock_error_seconds=own_offset.error_at(now_ns) / 1e9 if own_offset else None,
            )
        )
    return tuple(views)
