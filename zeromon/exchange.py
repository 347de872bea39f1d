"""The connection of a node's collector with the head of a run; see :mod:`zeromon.nodes`.

A thread of its own asks, so that a slow or silent head never holds up the collector. The head must be
reachable: its collector listens on an address of its node (``ZEROMON_HOST``), and all nodes have the
same ``ZEROMON_TOKEN``.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from zeromon.hangs import SILENT_SECONDS
from zeromon.nodes import (
    Card,
    Clock,
    Head,
    Offset,
    Peer,
    Reply,
    Report,
    Seen,
    legible,
    packed,
    to_head,
    told,
    unpacked,
    views,
)
from zeromon.skew import Joint, Match
from zeromon.snapshot import Away, Hang, NodeView

_TIMEOUT_SECONDS = 3.0
_FIRST_PINGS = 8
_STALE_SECONDS = 5.0
_MOST_WAITING = 8192
_MOST_JOINTS = 2048
_MOST_CARDS = 1 << 22
_REPORT = msgspec.json.Decoder(Report)
_REPLY = msgspec.json.Decoder(Reply)
_CARDS = msgspec.json.Decoder(list[Card])
_ENCODER = msgspec.json.Encoder()


def read_cards(folder: Path) -> list[Card]:
    """The nodes of the run in *folder*, as its agents have found them, the head first.

    None before that is known: it is the node of rank 0.
    """
    try:
        content = (folder / "nodes.json").read_bytes()[:_MOST_CARDS]
        cards = sorted(_CARDS.decode(content), key=lambda card: card.first_rank)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return []
    return [legible(card) for card in cards] if cards and cards[0].first_rank == 0 else []


def answer(head: Head, body: bytes, received_ns: int) -> bytes:
    """The head's side; raises :class:`msgspec.DecodeError`, a ValueError, for what is no report."""
    reply = head.answer(_REPORT.decode(body), received_ns)
    reply.replied_ns = time.monotonic_ns()
    return _ENCODER.encode(reply)


def report_of(body: bytes) -> str:
    """The run that a report is about."""
    return _REPORT.decode(body).run


class Exchange:
    """One node of one run. The collector gives and takes; a thread talks.

    *head*: on the node of rank 0, the one that is told without a connection.
    """

    def __init__(self, run: str, own: Card, cards: Sequence[Card], head: Head | None) -> None:
        self.run = run
        self.own = own
        self.head = head
        self.clock = Clock()
        self.note = ""
        self._address = cards[0].address
        self._head_is_local = cards[0].is_local
        self._head_name = cards[0].node
        self._joints: deque[Joint] = deque(maxlen=_MOST_WAITING)
        self._peers: list[Peer] = []
        self._matches: deque[Match] = deque(maxlen=_MOST_WAITING)
        self._reply: Reply | None = None
        self._replied = time.monotonic()
        """When the head was heard last, or this began."""
        self._heard: dict[int, Seen] = {}
        self._cards = {card.first_rank: card for card in (*cards, own)}
        self._sample = 1
        self._stopping = threading.Event()
        if head is None:
            threading.Thread(target=self._talk, name="exchange", daemon=True).start()

    def close(self) -> None:
        """Ends the thread, which nobody waits for."""
        self._stopping.set()

    def tell(self, joints: deque[Joint], peers: list[Peer]) -> None:
        """What is new here; *joints* is emptied."""
        while joints:
            joint = joints.popleft()
            if joint.sequence % self._sample == 0:
                self._joints.append(joint)
        self._peers = peers
        if self.head is not None:
            now = time.monotonic_ns()
            self._take(self.head.answer(self._report(now, 0), now), 0)

    @property
    def is_heard(self) -> bool:
        """Whether the head answered lately."""
        if self._reply is None:
            return False
        return time.monotonic() - self._replied < 3 * self._reply.every_seconds + _STALE_SECONDS

    def matches(self) -> Iterator[Match]:
        """What became known since the last call, by this node's clock."""
        while self._matches:
            yield self._matches.popleft()

    @property
    def hangs(self) -> tuple[Hang, ...]:
        """Of all nodes."""
        return self._reply.hangs if self._reply is not None else ()

    @property
    def away(self) -> tuple[Away, ...]:
        """Ranks of other nodes that matter now."""
        found = self._reply.away if self._reply is not None else []
        return tuple(away for away in found if away.node != self.own.node)

    def offset(self) -> Offset | None:
        """By how much the clock of this node is ahead of the head's; None on the head itself."""
        return self.clock.best(time.monotonic_ns())

    def nodes(self) -> tuple[NodeView, ...]:
        """All nodes, as the head heard them; while it is silent, it and they grow old together."""
        return views(
            self.cards(),
            self._heard,
            time.monotonic() - self._replied,
            self._reply.every_seconds if self._reply is not None else 1.0,
            self.own.first_rank,
            self.offset(),
            time.monotonic_ns(),
        )

    def cards(self) -> list[Card]:
        """All nodes that are known."""
        return [self._cards[rank] for rank in sorted(self._cards)]

    def learn(self, cards: Iterable[Card]) -> None:
        """Nodes that the job's own rendezvous knows by now."""
        for card in cards:
            self._cards.setdefault(card.first_rank, card)

    # ---- the thread ----------------------------------------------------------------------------

    def _talk(self) -> None:
        for number in range(1 << 62):
            began = time.monotonic()
            try:
                self._ask()
                self.note = ""
            except (OSError, ValueError, http.client.HTTPException) as error:
                if time.monotonic() - self._replied > SILENT_SECONDS:
                    self.note = self._why(error)
            every = self._reply.every_seconds if self._reply is not None else 1.0
            wait = 0.05 if number < _FIRST_PINGS and not self.note else every
            if self._stopping.wait(max(0.02, wait - (time.monotonic() - began))):
                return

    def _why(self, error: Exception) -> str:
        where = f"the collector of node {self._head_name}, {self._address or 'which has none'}"
        if isinstance(error, PermissionError):
            return f"{where}, refuses: set the same ZEROMON_TOKEN on all nodes"
        hint = ""
        if self._head_is_local:
            hint = (
                ": it listens there only; set ZEROMON_HOST=0.0.0.0 and ZEROMON_TOKEN on all nodes"
            )
        return f"ranks of other nodes are not matched, {where} does not answer{hint}"

    def _ask(self) -> None:
        """One exchange. The connection is made before the clock is read."""
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_SECONDS)
        try:
            connection.connect()
            now = time.monotonic_ns()
            offset = self.clock.best(now)
            report = self._report(now, None if offset is None else round(offset.value_ns))
            body = _ENCODER.encode(report)
            headers = {"Content-Type": "application/json", "Connection": "close"}
            token = os.environ.get("ZEROMON_TOKEN")
            if token:
                headers["Authorization"] = f"Bearer {token}"
            sent = time.monotonic_ns()
            connection.request("POST", "/api/exchange", body, headers)
            answered = connection.getresponse()
            content = answered.read()
            heard = time.monotonic_ns()
        finally:
            connection.close()
        if answered.status == 401:
            raise PermissionError("wants another token")
        if answered.status != 200:
            raise ValueError(f"answers {answered.status}")
        reply = _REPLY.decode(content)
        self.clock.heard(sent, reply.received_ns, reply.replied_ns, heard)
        best = self.clock.best(heard)
        self._take(reply, round(best.value_ns) if best is not None else 0)

    def _report(self, now_ns: int, shift: int | None) -> Report:
        """What is new, by the head's clock; while that is not known, only who we are."""
        report = Report(
            run=self.run,
            card=self.own,
            sent_ns=now_ns,
            round_trip_ns=self.clock.round_trip_ns(),
            known=len(self._cards),
        )
        if shift is None:
            return report
        joints = [self._joints.popleft() for _ in range(min(_MOST_JOINTS, len(self._joints)))]
        report.groups, report.joints = packed(to_head(joint, shift) for joint in joints)
        asked = self._reply.asked if self._reply is not None else ()
        report.peers = told(self._peers, asked, now_ns, shift)
        return report

    def _take(self, reply: Reply, shift: int) -> None:
        for match in unpacked(reply.groups, reply.matches):
            self._matches.append(match._replace(last_ns=match.last_ns + shift))
        self._sample = reply.sample
        told = {seen.card.first_rank: seen for seen in reply.nodes}
        self._cards.update({rank: seen.card for rank, seen in told.items()})
        # who is not named is heard: a silent one would be
        well = {rank: msgspec.structs.replace(s, heard=0.0) for rank, s in self._heard.items()}
        self._heard = well | told
        self._replied = time.monotonic()
        self._reply = reply
