"""A run that spreads over nodes: what their collectors tell each other, and what follows from it.

Once a second, more seldom the more nodes there are, every node's collector tells that of rank 0's node,
the *head*, when its ranks came to the collectives that they share with other nodes, and who lives; it
hears who was last of all, what hangs, and who has gone. Each exchange also compares the two clocks, as
NTP does: with t0 and t3 the times at the node and t1 and t2 those at the head, the node's clock is ahead
by ((t0 - t1) + (t3 - t2)) / 2, wrong by at most half of (t3 - t0) - (t2 - t1).

Pure, but for the lock around the head. The connection is in :mod:`zeromon.exchange`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import msgspec

from zeromon.hangs import SILENT_SECONDS, hangs_of
from zeromon.skew import NEVER, Joint, Match, match_of
from zeromon.snapshot import Away, GroupProgress, Hang, InFlight, NodeView
from zeromon.units import printable

_MOST_JOINTS_A_SECOND = 10_000
_MOST_NAMED = 64
"""Of so many nodes all are named in every answer; of more, those that are new or silent."""
_MOST_PENDING = 16384
_MOST_AWAY = 64
_NODES_A_SECOND = 32
_SELDOM_SECONDS = 10.0
_OLD_NS = 5_000_000_000
"""A collective in flight for so long is told to the head."""
_LAST_TRIPS = 10
_FAR_SECONDS = 0.001
"""A round trip of less is not told of each of many nodes."""
_DRIFT = 50e-6
"""Seconds a second by which two clocks may run apart, until they are compared again."""


class Card(msgspec.Struct, frozen=True):
    """A node, as it introduces itself."""

    node: str
    address: str
    """Where its collector is reached; "" when it has none."""
    first_rank: int
    ranks: int
    run: str = ""
    """What the head calls the run; "" on the other nodes."""
    started: float = 0.0

    @property
    def is_local(self) -> bool:
        """Whether its collector is reached from its own machine only."""
        return self.address.startswith(("127.", "localhost:", "[::1]"))


class Peer(msgspec.Struct, frozen=True):
    """A rank of another node, as much of it as concerns the others."""

    rank: int
    node: str
    alive: bool
    failed: bool
    ended: str
    step_seconds: float | None
    doing: str
    in_flight: tuple[InFlight, ...] = ()
    groups: tuple[GroupProgress, ...] = ()


class Report(msgspec.Struct):
    """What a node tells the head. Times are by the head's clock, those of *sent_ns* by its own."""

    run: str
    card: Card
    sent_ns: int
    round_trip_ns: int = -1
    """To the head and back, the shortest of the last exchanges; -1 before the first."""
    known: int = 0
    """So many nodes it knows."""
    groups: list[str] = []
    joints: list[tuple[int, Joint]] = []
    """With the place of its group in *groups*; the group itself is empty there."""
    peers: list[Peer] = []


def legible(card: Card) -> Card:
    """*card* from elsewhere, with a name that steers no terminal."""
    return msgspec.structs.replace(card, node=printable(card.node), address=printable(card.address))


def _legible(peer: Peer, node: str) -> Peer:
    """The same of a rank; its node is the one that speaks."""
    return msgspec.structs.replace(
        peer, node=node, ended=printable(peer.ended), doing=printable(peer.doing)
    )


class Seen(msgspec.Struct, frozen=True):
    """A node, how long ago the head heard of it, and how long the way there and back takes, seconds."""

    card: Card
    heard: float
    round_trip: float = -1.0


class Reply(msgspec.Struct):
    """What it hears back."""

    received_ns: int
    replied_ns: int
    every_seconds: float
    sample: int = 1
    """Of so many collectives one is to be told."""
    nodes: list[Seen] = []
    """All, or where they are many and known, those that are silent."""
    groups: list[str] = []
    matches: list[tuple[int, Match]] = []
    hangs: tuple[Hang, ...] = ()
    away: list[Away] = []
    asked: list[str] = []
    """Groups whose progress is wanted."""


class Offset(NamedTuple):
    """By how much the clock of this node is ahead of the head's, nanoseconds."""

    value_ns: float
    error_ns: float
    at_ns: int
    """By this node's clock."""

    def error_at(self, now_ns: int) -> float:
        """The bound of its error at *now_ns*, as clocks drift."""
        return self.error_ns + _DRIFT * max(0, now_ns - self.at_ns)


def offset_of(t0: int, t1: int, t2: int, t3: int) -> Offset:
    """From one exchange."""
    return Offset(((t0 - t1) + (t3 - t2)) / 2, max(0, (t3 - t0) - (t2 - t1)) / 2, t3)


_Row = TypeVar("_Row", Joint, Match)


class Clock:
    """The offset of this node's clock: the best of the last exchanges, as old as each is by now."""

    def __init__(self) -> None:
        self._offsets: deque[Offset] = deque(maxlen=64)

    def heard(self, t0: int, t1: int, t2: int, t3: int) -> None:
        """Adds an exchange."""
        self._offsets.append(offset_of(t0, t1, t2, t3))

    def round_trip_ns(self) -> int:
        """The way to the head and back: the shortest of the last exchanges; -1 before the first."""
        last = list(self._offsets)[-_LAST_TRIPS:]
        return round(2 * min((offset.error_ns for offset in last), default=-0.5))

    def best(self, now_ns: int) -> Offset | None:
        """The one whose error is least now; None before the first."""
        return min(self._offsets, key=lambda offset: offset.error_at(now_ns), default=None)


def to_head(joint: Joint, shift: int) -> Joint:
    """*joint* by the head's clock; *shift*: this node's clock less the head's."""
    before = joint.before_ns if joint.before_ns == NEVER else joint.before_ns - shift
    return joint._replace(
        first_ns=joint.first_ns - shift, last_ns=joint.last_ns - shift, before_ns=before
    )


def told(peers: Iterable[Peer], asked: Iterable[str], now_ns: int, shift: int) -> list[Peer]:
    """*peers* with what hangs, and with how far they are in the groups that were *asked* for.

    The members of a group are named once a node: they may be thousands.
    """
    wanted = set(asked)
    named: set[str] = set()
    found = []
    for peer in peers:
        inside = tuple(
            replace(entry, issued_ns=entry.issued_ns - shift)
            for entry in peer.in_flight
            if entry.group_id in wanted or now_ns - entry.issued_ns > _OLD_NS
        )
        about = wanted | {entry.group_id for entry in inside}
        groups = []
        for group in peer.groups:
            if group.group_id in about:
                groups.append(group if group.group_id not in named else replace(group, ranks=()))
                named.add(group.group_id)
        found.append(msgspec.structs.replace(peer, in_flight=inside, groups=tuple(groups)))
    return found


@dataclass(slots=True)
class _Node:
    """What the head knows of one node."""

    card: Card
    heard_ns: int
    peers: list[Peer]
    outbox: deque[Match]
    round_trip_ns: int = -1


@dataclass(slots=True)
class _Collective:
    """What the nodes have said of one so far."""

    joints: dict[int, Joint]
    here: int
    """So many members have come."""


def packed(joints: Iterable[_Row]) -> tuple[list[str], list[tuple[int, _Row]]]:
    """The groups, which have long names and are few, and for each row the place of its own."""
    places: dict[str, int] = {}
    rows = [(places.setdefault(row.group, len(places)), row._replace(group="")) for row in joints]
    return list(places), rows


def unpacked(groups: Sequence[str], rows: Iterable[tuple[int, _Row]]) -> Iterator[_Row]:
    """The rows again; raises a ValueError for a place that no group has."""
    for place, row in rows:
        if not 0 <= place < len(groups):
            raise ValueError(f"no group {place}")
        yield row._replace(group=groups[place])


def silent_after(every_seconds: float) -> float:
    """When a node that tells the head something *every_seconds* is taken for gone."""
    return max(SILENT_SECONDS, 2.5 * every_seconds)


class Head:
    """What the node of rank 0 does for all of one run."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._pending: OrderedDict[tuple[str, int], _Collective] = OrderedDict()
        self._lock = threading.Lock()
        self._sample = 1
        self._joints = 0
        """Since it was last judged."""
        self._hangs: tuple[Hang, ...] = ()
        self._away: list[Away] = []
        self._all: list[Seen] = []
        self._odd: list[Seen] = []
        """Those that are silent or far."""
        self._judged_ns = -(1 << 62)

    def answer(self, report: Report, received_ns: int) -> Reply:
        """Takes a report in, and says what is known. Called by any thread."""
        with self._lock:
            card = legible(report.card)
            node = self._nodes.get(card.first_rank)
            if node is None:
                node = _Node(card, received_ns, [], deque(maxlen=_MOST_PENDING))
                self._nodes[card.first_rank] = node
            node.card, node.heard_ns = card, received_ns
            node.peers = [_legible(peer, card.node) for peer in report.peers]
            node.round_trip_ns = report.round_trip_ns
            for joint in unpacked(report.groups, report.joints):
                self._take(report.card.first_rank, joint)
            self._joints += len(report.joints)
            if received_ns - self._judged_ns > 500_000_000:
                self._thin(max(0.5, (received_ns - self._judged_ns) / 1e9))
                self._judged_ns = received_ns
                self._judge(received_ns)
                self._list(received_ns)
            groups, matches = packed(node.outbox)
            node.outbox.clear()
            return Reply(
                received_ns=received_ns,
                replied_ns=received_ns,
                every_seconds=self._every(),
                sample=self._sample,
                nodes=self._odd if _MOST_NAMED < len(self._nodes) <= report.known else self._all,
                groups=groups,
                matches=matches,
                hangs=self._hangs,
                away=self._away,
                asked=sorted({hang.group_id for hang in self._hangs}),
            )

    def _every(self) -> float:
        return min(_SELDOM_SECONDS, max(1.0, len(self._nodes) / _NODES_A_SECOND))

    def _thin(self, seconds: float) -> None:
        """Asks for fewer collectives where they are too many, and for more again."""
        rate, self._joints = self._joints / seconds, 0
        if rate > _MOST_JOINTS_A_SECOND:
            self._sample = min(1 << 20, 2 * self._sample)
        elif rate < _MOST_JOINTS_A_SECOND / 4:
            self._sample = max(1, self._sample // 2)

    def _list(self, now_ns: int) -> None:
        """What is said of the nodes until this is made anew."""
        limit = silent_after(self._every())
        self._all = [
            Seen(node.card, (now_ns - node.heard_ns) / 1e9, node.round_trip_ns / 1e9)
            for _, node in sorted(self._nodes.items())
        ]
        self._odd = [s for s in self._all if s.heard > limit or s.round_trip > _FAR_SECONDS]

    def _take(self, node: int, joint: Joint) -> None:
        """Joins what the nodes say of one collective."""
        key = joint.group, joint.sequence
        inside = self._pending.get(key)
        if inside is None:
            inside = self._pending[key] = _Collective({}, 0)
            if len(self._pending) > _MOST_PENDING:
                self._pending.popitem(last=False)
        if node not in inside.joints:
            inside.here += joint.here
        inside.joints[node] = joint
        if inside.here >= joint.size:
            self._pending.pop(key, None)
            match = match_of(list(inside.joints.values()))
            for member in inside.joints:
                self._nodes[member].outbox.append(match)

    def _judge(self, now_ns: int) -> None:
        """Who hangs in what, by the ranks of all nodes that are still heard."""
        members: list[Peer] = []
        for node in self._nodes.values():
            if (now_ns - node.heard_ns) / 1e9 < silent_after(self._every()):
                members += node.peers
        self._hangs = hangs_of(members, now_ns)
        concerned = {r for hang in self._hangs for r in (*hang.missing[:8], *hang.dead[:8])}
        self._away = [
            Away(rank=p.rank, node=p.node, alive=p.alive, failed=p.failed, ended=p.ended, doing=p.doing)
            for p in members
            if p.failed or p.rank in concerned
        ][:_MOST_AWAY]  # fmt: skip


def views(
    cards: Iterable[Card],
    heard: Mapping[int, Seen],
    since_seconds: float,
    every_seconds: float,
    here: int,
    offset: Offset | None,
    now_ns: int,
) -> tuple[NodeView, ...]:
    """All nodes. *heard*: by first rank, what the head said *since_seconds* ago; *here*: this node."""
    found = []
    for card in cards:
        is_here, seen = card.first_rank == here, heard.get(card.first_rank)
        known = offset if is_here else None
        ago = 0.0 if is_here else None if seen is None else seen.heard + since_seconds
        found.append(
            NodeView(
                node=card.node,
                address=card.address,
                first_rank=card.first_rank,
                ranks=card.ranks,
                here=is_here,
                heard_seconds=ago,
                silent=ago is not None and ago > silent_after(every_seconds),
                round_trip_seconds=seen.round_trip if seen and seen.round_trip >= 0 else None,
                clock_offset_seconds=known.value_ns / 1e9 if known else None,
                clock_error_seconds=known.error_at(now_ns) / 1e9 if known else None,
            )
        )
    return tuple(found)
