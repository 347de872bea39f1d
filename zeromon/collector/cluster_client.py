"""The connection of a node's collector to the leader of a run; see :mod:`zeromon.collector.cluster`.

A thread sends the reports, so that a slow or silent leader never delays the collector. The leader must
be reachable: its collector listens on an address of its node (``ZEROMON_HOST``), and all nodes have the
same ``ZEROMON_TOKEN``, which signs each report and reply and is in none (:mod:`zeromon.ring.tokens`).
"""

import hmac
import http.client
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from zeromon.base.units import printable, with_usual_numbers
from zeromon.collector import cluster
from zeromon.diagnosis.arrivals import ArrivalSkew, MatchedCollective, PartialArrival
from zeromon.diagnosis.hangs import as_member, hangs_of, since_difference
from zeromon.fold.collectives import group_call_histories
from zeromon.fold.state import RankState
from zeromon.readout.text import doing
from zeromon.ring.tokens import NONCE, REPLY, REPORT, SIGNATURE, request_proof_headers, signature_of
from zeromon.snapshot import Hang, RankSnapshot
from zeromon.snapshot.communication import CallHistory
from zeromon.snapshot.levels import NODE_SILENT_SECONDS
from zeromon.snapshot.run import NodeView, RemoteRank

_TIMEOUT_SECONDS = 3.0
_FIRST_PINGS, _PING = 8, 0.05
"""So many reports come first for the clock, with this share of the usual time between them."""
_STALE_SECONDS = 5.0
_MAX_WAITING = 8192
_MAX_JOINTS = 2048
_MAX_CARDS_BYTES = 1 << 22
_MAX_REPLY_BYTES = 1 << 26
_SENDER = msgspec.json.Decoder(cluster.Sender)
_REPORT = msgspec.json.Decoder(cluster.NodeReport)
_VERSION = msgspec.json.Decoder(cluster.Version)
_REPLY = msgspec.json.Decoder(cluster.LeaderReply)
_Message = TypeVar("_Message", cluster.Sender, cluster.NodeReport, cluster.Version, cluster.LeaderReply)
_CARDS = msgspec.json.Decoder(list[cluster.NodeInfo])
_ENCODER = msgspec.json.Encoder()


def read_node_infos(folder: Path) -> list[cluster.NodeInfo]:
    """Returns the nodes of the run in *folder* that its agents have written, the leader first.

    Returns [] while the leader, the node of rank 0, is unknown.
    """
    try:
        content = (folder / "nodes.json").read_bytes()[:_MAX_CARDS_BYTES]
        cards = sorted(_CARDS.decode(content), key=lambda card: card.first_rank)
    except (OSError, ValueError, RecursionError):
        return []
    is_led = bool(cards) and cards[0].first_rank == 0
    return [cluster.printable_node_info(card) for card in cards] if is_led else []


class NodeList:
    """The nodes of :func:`read_node_infos`, read again when their file has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: tuple[int, int, int] | None = None
        self._nodes: list[cluster.NodeInfo] = []

    def read(self) -> list[cluster.NodeInfo]:
        """Returns them; the same list while nothing has changed."""
        stamp = None
        with suppress(OSError):
            file_stat = (self._folder / "nodes.json").stat()
            # The inode too: a file replaced within one tick of the clock may keep its time and size
            stamp = file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size
        if stamp is None or stamp != self._stamp:
            self._stamp, self._nodes = stamp, read_node_infos(self._folder)
        return self._nodes


def reply_signature(token: str, nonce: str, body: bytes) -> str:
    """Returns the signature of the reply *body* to the report with *nonce*."""
    return signature_of(token, REPLY, nonce.encode(), body)


def _decode_message(decoder: msgspec.json.Decoder[_Message], content: bytes) -> _Message:
    """Returns a message of another node; raises :class:`ValueError` for a malformed one."""
    try:
        return decoder.decode(with_usual_numbers(content))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def answer_report(leader: cluster.Leader, body: bytes, received_ns: int) -> bytes:
    """Returns the leader's reply to a report; raises :class:`ValueError` for a malformed one."""
    if leader.reads(_decode_message(_SENDER, body)):
        reply = leader.answer(_decode_message(_REPORT, body), received_ns)
    else:
        reply = cluster.LeaderReply(received_ns, received_ns, 1.0)
    reply.replied_ns = time.monotonic_ns()
    return _ENCODER.encode(reply)


def run_of_report(body: bytes) -> str:
    """Returns the run of a report; raises :class:`ValueError` for a malformed one."""
    return _decode_message(_SENDER, body).run


class _OtherVersion(ValueError):
    """The leader's messages have another layout; its text says which versions the two nodes run."""


class ClusterSync:
    """The exchange of one node of one run; its own thread talks to the leader.

    *leader*: the leader, on its own node, which needs no connection; None on the other nodes.
    """

    def __init__(
        self,
        run: str,
        own_node: cluster.NodeInfo,
        cards: Sequence[cluster.NodeInfo],
        leader: cluster.Leader | None,
    ) -> None:
        self.run = run
        self.own = own_node
        self.leader = leader
        self.clock = cluster.Clock()
        self.note = ""
        self._address = cards[0].address
        self._leader_is_local = cards[0].is_local
        self._leader_name = cards[0].node
        self._joints: deque[PartialArrival] = deque(maxlen=_MAX_WAITING)
        self._peers: list[cluster.PeerRank] = []
        self._matches: deque[MatchedCollective] = deque(maxlen=_MAX_WAITING)
        self._reply: cluster.LeaderReply | None = None
        self._replied = time.monotonic()
        """When the leader replied last, or when this object was made."""
        self._heard: dict[int, cluster.KnownNode] = {}
        self._cards = {card.first_rank: card for card in (*cards, own_node)}
        self._sample = 1
        self._stopping = threading.Event()
        if leader is None:
            threading.Thread(target=self._run, name="exchange", daemon=True).start()

    def close(self) -> None:
        """Ends the thread without waiting for it."""
        self._stopping.set()

    def enqueue_arrivals(self, joints: deque[PartialArrival], peers: list[cluster.PeerRank]) -> None:
        """Queues new arrivals, and the state of the local ranks, for the leader; empties *joints*."""
        while joints:
            joint = joints.popleft()
            # By sequence number: all nodes drop the same collectives, and the others are complete
            if joint.sequence % self._sample == 0:
                self._joints.append(joint)
        self._peers = peers
        if self.leader is not None:
            now_ns = time.monotonic_ns()
            self._take(self.leader.answer(self._report(now_ns, 0), now_ns), 0)
            self.note = self.leader.note

    @property
    def is_leader_heard(self) -> bool:
        """True if the last reply of the leader is recent."""
        if self._reply is None:
            return False
        return time.monotonic() - self._replied < 3 * self._reply.every_seconds + _STALE_SECONDS

    def matches(self) -> Iterator[MatchedCollective]:
        """Yields the matches since the last call, by this node's clock."""
        while self._matches:
            yield self._matches.popleft()

    @property
    def hangs(self) -> tuple[Hang, ...]:
        """Collectives that hang, from the ranks of all nodes."""
        return self._reply.hangs if self._reply is not None else ()

    @property
    def away(self) -> tuple[RemoteRank, ...]:
        """Ranks of other nodes that failed or that take part in a hang."""
        ranks = self._reply.away if self._reply is not None else []
        return tuple(rank for rank in ranks if rank.node != self.own.node)

    def offset(self) -> cluster.ClockOffset | None:
        """Returns how far this node's clock is ahead of the leader's; None on the leader."""
        return self.clock.best(time.monotonic_ns())

    def nodes(self) -> tuple[NodeView, ...]:
        """Returns all nodes with the time since their last reports, from the leader's reply."""
        return cluster.make_node_views(
            self.cards(),
            self._heard,
            time.monotonic() - self._replied,
            self._report_interval(),
            self.own.first_rank,
            self.offset(),
            time.monotonic_ns(),
        )

    def cards(self) -> list[cluster.NodeInfo]:
        """Returns all known nodes, by first rank."""
        return [self._cards[rank] for rank in sorted(self._cards)]

    def learn_nodes(self, cards: Iterable[cluster.NodeInfo]) -> None:
        """Adds nodes that the agents' rendezvous has listed."""
        for card in cards:
            self._cards.setdefault(card.first_rank, card)

    def _report_interval(self) -> float:
        """Seconds between reports: as the leader says, and not less than the known nodes need."""
        leader_seconds = self._reply.every_seconds if self._reply is not None else 0.0
        return max(leader_seconds, cluster.report_interval_seconds(len(self._cards)))

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        for number in range(1 << 62):
            start = time.monotonic()
            try:
                self._exchange_report()
                self.note = ""
            except (OSError, ValueError, http.client.HTTPException) as error:
                # A single exchange may fail: without the delay the note of the run would come and go
                if time.monotonic() - self._replied > NODE_SILENT_SECONDS:
                    self.note = self._refusal_reason(error)
            every = self._report_interval()
            wait = _PING * every if number < _FIRST_PINGS and not self.note else every
            if self._stopping.wait(max(0.02, wait - (time.monotonic() - start))):
                return

    def _refusal_reason(self, error: Exception) -> str:
        leader_text = f"the collector of node {self._leader_name}, {self._address or 'which has none'}"
        if not os.environ.get("ZEROMON_TOKEN"):
            needs = "ZEROMON_HOST=0.0.0.0 and the same ZEROMON_TOKEN on all nodes"
            return f"ranks of other nodes are not matched without a token: set {needs}"
        if isinstance(error, PermissionError):
            return f"{leader_text}, refuses: set the same ZEROMON_TOKEN on all nodes"
        if isinstance(error, _OtherVersion):
            return str(error)
        hint = ""
        if self._leader_is_local:
            hint = ": it listens there only; set ZEROMON_HOST=0.0.0.0 and ZEROMON_TOKEN on all nodes"
        return f"ranks of other nodes are not matched, {leader_text} does not answer{hint}"

    def _exchange_report(self) -> None:
        """Sends one report and takes the reply. Connects before it reads the clock."""
        token = os.environ.get("ZEROMON_TOKEN", "")
        if not token:  # nothing could prove whom the address leads to
            raise PermissionError("it has no token")
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_SECONDS)
        try:
            # The clock is read after this: the handshake would count as time on the way to the leader
            connection.connect()
            now_ns = time.monotonic_ns()
            offset = self.clock.best(now_ns)
            report = self._report(now_ns, None if offset is None else round(offset.value_ns))
            body = _ENCODER.encode(report)
            proof = request_proof_headers(token, REPORT, body)
            headers = {"Content-Type": "application/json", "Connection": "close", **proof}
            sent = time.monotonic_ns()
            connection.request("POST", "/api/exchange", body, headers)
            answered = connection.getresponse()
            content = answered.read(_MAX_REPLY_BYTES + 1)
            heard = time.monotonic_ns()
        finally:
            connection.close()
        if answered.status == 401:
            raise PermissionError("wants another token")
        if answered.status != 200:
            raise ValueError(f"answers {answered.status}")
        # Before the body is decoded: whoever published a false node answers with any text
        given_signature = answered.headers.get(SIGNATURE, "")
        # As bytes: compare_digest raises TypeError for a str that is not ASCII
        if len(content) > _MAX_REPLY_BYTES or not hmac.compare_digest(
            given_signature.encode(), reply_signature(token, proof[NONCE], content).encode()
        ):
            raise PermissionError("answers with another token")
        if reason := cluster.version_mismatch(self._leader_name, _decode_message(_VERSION, content)):
            raise _OtherVersion(reason)
        reply = _decode_message(_REPLY, content)
        self.clock.heard(sent, reply.received_ns, reply.replied_ns, heard)
        best_offset = self.clock.best(heard)
        self._take(reply, round(best_offset.value_ns) if best_offset is not None else 0)

    def _report(self, now_ns: int, shift: int | None) -> cluster.NodeReport:
        """Returns the report by the leader's clock; without arrivals and ranks if *shift* is None."""
        report = cluster.NodeReport(
            run=self.run, card=self.own, round_trip_ns=self.clock.round_trip_ns(), known=len(self._cards)
        )
        if shift is None:
            return report
        joints = [self._joints.popleft() for _ in range(min(_MAX_JOINTS, len(self._joints)))]
        report.groups, report.joints = cluster.pack_groups(
            cluster.to_leader_clock(j, shift) for j in joints
        )
        asked_groups = self._reply.asked if self._reply is not None else ()
        report.peers = cluster.peer_rank_updates(self._peers, asked_groups, now_ns, shift)
        return report

    def _take(self, reply: cluster.LeaderReply, shift: int) -> None:
        for match in cluster.unpack_groups(reply.groups, reply.matches):
            self._matches.append(match._replace(last_ns=match.last_ns + shift))
        self._sample = reply.sample
        listed = {node.card.first_rank: node for node in reply.nodes}
        self._cards.update({rank: node.card for rank, node in listed.items()})
        # the leader omits nodes that are not silent
        heard = {rank: msgspec.structs.replace(s, heard=0.0) for rank, s in self._heard.items()}
        self._heard = heard | listed
        self._replied = time.monotonic()
        self._reply = reply


# ---- one run's exchange with the collectors of its other nodes ----------------------------------

NOTE, _MAX_NOTE_CHARS = "nodes.note", 400
"""File in which the agents' rendezvous names missing nodes, and its maximum length, characters."""
_NAMING_SECONDS = 15.0
"""Timeout of the agents' rendezvous, after which the run is named without the other nodes."""


class RunCluster:
    """The connection of one run to its other nodes. On a single node it does nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sync: ClusterSync | None = None
        self._peers: list[cluster.PeerRank] = []
        """The local ranks of the last snapshot, as reported to other nodes."""
        self._list = NodeList(folder)
        self._learned: list[cluster.NodeInfo] = []
        self._first_ring = 0.0

    def can_name_run(self, states: Sequence[RankState]) -> bool:
        """Returns whether the run's name is known: nodes after the first use the name of the first."""
        if not states:
            return False
        self._first_ring = self._first_ring or time.monotonic()
        if any(state.rank == 0 for state in states) or self._list.read():
            return True
        single_node = any(_is_single_node(state.meta) for state in states)
        return single_node or time.monotonic() - self._first_ring > _NAMING_SECONDS

    def connect(self, run: str, ranks: Iterable[int], lead: Callable[[str], cluster.Leader]) -> None:
        """Starts to exchange reports once the agents have listed the other nodes.

        *lead* makes the leader of a run; it is called on the node of rank 0 only.
        """
        nodes = self._list.read()
        if self._sync is not None:
            # Identity: NodeList returns the same object while its file is unchanged
            if nodes is not self._learned:
                self._sync.learn_nodes(nodes)
                self._learned = nodes
            return
        local = set(ranks)
        own_node = next((node for node in nodes if node.first_rank in local), None)
        if own_node is None or len(nodes) < 2:
            return
        leader = lead(run) if own_node is nodes[0] else None
        self._sync = ClusterSync(nodes[0].run or run, own_node, nodes, leader)

    def exchange(self, skew: ArrivalSkew) -> None:
        """Sends the arrivals that *skew* could not match on this node; records the leader's matches."""
        if self._sync is None:
            return
        self._sync.enqueue_arrivals(skew.outgoing, self._peers)
        for match in self._sync.matches():
            skew.record_match(match)
        # While the leader is silent, collectives over nodes would wait for matches that do not come
        skew.joined = self._sync.is_leader_heard

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
        """True if the run has several nodes, and they are known."""
        return self._sync is not None

    def find_hangs(
        self, states: Sequence[RankState], ranks: Sequence[RankSnapshot], now_ns: int
    ) -> tuple[Hang, ...]:
        """The hangs by the ranks of all nodes; what members called differently, by those of this one."""

        def recent_calls(group: str) -> list[CallHistory]:
            return [history for state in states for history in group_call_histories(state, group)]

        if self._sync is None or not self._sync.is_leader_heard:
            return hangs_of(map(as_member, ranks), now_ns, recent_calls)
        return tuple(since_difference(hang, recent_calls) for hang in self._sync.hangs)

    @property
    def away(self) -> tuple[RemoteRank, ...]:
        """Ranks of other nodes that failed or take part in a hang; () while the leader is silent."""
        return self._sync.away if self._sync is not None and self._sync.is_leader_heard else ()

    @property
    def note(self) -> str:
        """Why ranks of other nodes are unknown; "" where they are known."""
        if self._sync is not None and self._sync.note:
            return self._sync.note
        with suppress(OSError):
            return printable((self._folder / NOTE).read_text(errors="replace")[:_MAX_NOTE_CHARS])
        return ""

    def nodes(self) -> tuple[NodeView, ...]:
        """All nodes of the run, the leader first; () on a single node."""
        return self._sync.nodes() if self._sync is not None else ()

    def reachable_nodes(self) -> list[cluster.NodeInfo]:
        """The nodes whose collectors can be reached from here, this one included."""
        if self._sync is None:
            return []
        own_rank = self._sync.own.first_rank
        # another node's loopback address would lead to this node's collector
        return [n for n in self._sync.cards() if n.first_rank == own_rank or not n.is_local]

    def clock_error_seconds(self) -> float:
        """The bound of the error between this node's clock and the leader's, seconds."""
        offset = self._sync.offset() if self._sync is not None else None
        return offset.error_at(time.monotonic_ns()) / 1e9 if offset else 0.0


def as_peer_rank(rank: RankSnapshot, node: str) -> cluster.PeerRank:
    """Returns the fields of *rank*, a rank of *node*, that other nodes need."""
    return cluster.PeerRank(
        rank=rank.rank,
        node=node,
        alive=rank.status.alive,
        failed=rank.status.failed and not rank.status.stopped,
        ended=rank.status.ended,
        step_seconds=rank.steps.median_seconds,
        doing=doing(rank),
        in_flight=rank.communication.in_flight,
        groups=rank.communication.groups,
        pause=rank.status.pause,
        stopped=rank.status.stopped,
        last_event_ns=rank.status.last_event_ns,
    )


def _is_single_node(meta: dict[str, Any]) -> bool:
    """Returns whether all ranks of the job run on the node of the rank with this metadata."""
    local = meta.get("local_world_size")
    return isinstance(local, int) and 0 < meta.get("world_size", 1) <= local
